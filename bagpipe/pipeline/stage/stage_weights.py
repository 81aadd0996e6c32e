"""`StageWeights`: the weights of one stage on one rank: when they are whole, who sums their gradients and steps them.

StageWeights          its parameters, or this rank's share of them, and the versions of an asynchronous schedule
ChunkedStageWeights   the same in chunks under a byte budget            (`bagpipe.pipeline.stage.chunked_stages`)

REDUCE_GRAD  reduce      X_MEASURE  measure      OPT  step, or leave_out      UNSHARD  unshard      RESHARD  reshard
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bagpipe.dense.clip import NO_CLIP, Clip, Limited, Prepare
from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.pipeline.stream import keep_for_current_stream

__all__ = ["StageWeights"]


class StageWeights:
    """See above. All holders of the stage make the same calls.

    Args:
        stage: its number.
        parameters: trainable ones, by name in the whole model.
        optimizer: of what is stepped; None: there is nothing to step.
        share: this rank's, if the holders divide the stage; None: they do not.
        versions: of an asynchronous schedule; None: the newest weights alone are here.
        sums: sums gradients over the holders; None: this rank alone holds the stage, or it is divided.

    Attributes:
        stage, parameters, optimizer, share, versions, sums: as given.
    """

    def __init__(
        self,
        stage: int,
        parameters: tuple[tuple[str, Parameter], ...],
        *,
        optimizer: Optimizer | None,
        share: StageShare | None = None,
        versions: StageVersions | None = None,
        sums: Callable[[int, Collection[int] | None], None] | None = None,
    ) -> None:
        self.stage = stage
        self.parameters = parameters
        self.optimizer = optimizer
        self.share = share
        self.versions = versions
        self.sums = sums

    @property
    def stepped(self) -> Sequence[Parameter]:
        """What the optimizer steps, in the order of the parameters."""
        segments = {} if self.share is None else self.share.segments
        return [segments.get(name, parameter) for name, parameter in self.parameters]

    def acting(self, number: int, op: str, handler: Handler) -> Handler:
        """A forward, a backward or half of one, or a repetition, of an instance of the stage, with its weights."""
        return handler

    def reduce(self, givers: Collection[int] | None = None) -> None:
        """Sum the gradients, complete on each holder, over the holders.

        Args:
            givers: the ranks that have gradients; None: all holders.

        Raises:
            PeerError: a peer is gone or silent.
        """
        if self.share is not None:
            for _, parameter in self.parameters:
                if parameter.grad is not None:
                    keep_for_current_stream(parameter.grad)  # it can be freed before this lane has copied it
            self.share.reduce()
        elif self.sums is not None:
            self.sums(self.stage, givers)

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Names, and values that are finite if the summed gradients are."""
        if self.share is not None:
            return self.share.checked()
        return ((name, parameter.grad) for name, parameter in self.parameters if parameter.grad is not None)

    def show(self, wanted: Container[str], prepare: Prepare) -> None:
        """After `reduce`: parameters of these names have their summed gradients, in `grad`; of a share they have them.

        Args:
            wanted: names.
            prepare: called once for each gradient that is stepped with, here; then not in `measure`.
        """
        shown = [parameter for name, parameter in self.parameters if name in wanted]
        prepare([*{id(each): each for each in (*self.stepped, *shown)}.values()])

    def take_shown(self, wanted: Container[str]) -> None:
        """After `show`: what is stepped takes the gradients that the parameters have now."""
        if self.share is not None:
            self.share.take_shown(wanted)

    def measure(self, prepare: Prepare, clip: Clip) -> Tensor | None:
        """Make the summed gradients those that are stepped with, but for the limit of their norm.

        Args:
            prepare: called once for each gradient, here or in `step`.
            clip: limits elements after that.

        Returns:
            `Clip.norms` of what is stepped, squares of a share; None: nobody needs them.
        """
        parameters = [*self.stepped]
        prepare(parameters)
        if not parameters or not (clip.limits_dense or clip.value):
            return None
        return clip.norms(parameters, squares=self.share is not None)

    def step(self, b: int, clip: Clip = NO_CLIP, limited: Limited | None = None) -> None:
        """After `measure`: multiply the gradients of batch b by what limits their norm, and step the optimizer."""
        if limited is not None:
            clip.scale(self.stepped, limited)
        self._step(b)

    def leave_out(self, b: int, *, is_skipped: bool) -> None:
        """In place of `step`: batch b changes nothing.

        Args:
            b: number of the batch.
            is_skipped: it is not finite; otherwise no backward of it reached the stage.
        """
        self._step(b, is_left_out=True)

    def unshard(self, index: int) -> None:
        """Gather the parameters if they are divided: after the steps of all holders, or before computations.

        Args:
            index: of the UNSHARD; the number of the batch whose step it follows, if weights have versions.
        """
        if self.share is not None:
            self.share.gather()
            if self.versions is not None:
                self.versions.gathered()
                self.versions.after_step(index)

    def reshard(self) -> None:
        """Release the whole parameters, if they are divided."""
        if self.share is not None:
            self.share.release()

    def arrive(self) -> None:
        """Gathered parameters are where they belong."""
        return

    def settle(self) -> None:
        """The weights and the optimizer's state can be read where they are."""
        return

    def _step(self, b: int, *, is_left_out: bool = False) -> None:
        if self.optimizer is None:
            return
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                # The gradient can belong to the lane that sums gradients, which continues during the step.
                keep_for_current_stream(parameter.grad)
        if self.versions is not None:
            self.versions.before_step(b)
        if not is_left_out:
            self.optimizer.step()
        if self.versions is not None:
            if not is_left_out:
                self.versions.stepped()
            if self.share is None:
                self.versions.after_step(b)
        self.optimizer.zero_grad(set_to_none=True)
        if self.share is not None:
            self.share.clear()
