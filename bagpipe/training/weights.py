"""`Weights`: the parameters of a whole model on one rank: where they lie, who sums their gradients and steps them.

ResidentWeights   all of them are here; gradients are summed over the ranks (`DenseParallel`)
ShardedWeights    a share of the optimizer's state, gradients or parameters is (`ShardedModel`)
ChunkedWeights    either, in chunks under a byte budget               (`bagpipe.training.chunked_weights`)

a batch:  begin_batch  forward  backward  reduce  measure  step  clear
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from bagpipe.checkpoint.dense_pieces import Shares
from bagpipe.checkpoint.dense_state import DenseCopy, DenseState, capture
from bagpipe.dense.clip import Clip, Limited, Prepare
from bagpipe.dense.lamb import Lamb
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.errors import InputError
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stream import Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.training.digest import dense_digest, state_digest
from bagpipe.types.model_inputs import device_of

__all__ = ["GradientSum", "ResidentWeights", "ShardedWeights", "Weights"]

#: They step each element by itself, so a share is stepped as the whole is.
_ELEMENTWISE = (SGD, Adagrad, Adam, AdamW)


def _hooks_around_step(optimizer: Optimizer) -> tuple[tuple[Callable[..., object], ...], ...]:
    """Hooks before and after a step that the step itself does not call.

    torch makes `step` call them when `Optimizer.__init__` prepares the class, which torchrec's optimizers leave out.
    """
    if getattr(type(optimizer).step, "hooked", False):
        return (), ()
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return tuple((*vars(optimizer).get(name, {}).values(),) for name in names)


class GradientSum(Protocol):
    """Sums the gradients of a model over the ranks that train it."""

    def reduce(self, *, is_bad: bool | None = None) -> bool:
        """Make the gradients the sums over all ranks; by all ranks, once per batch.

        Args:
            is_bad: this rank's batch is not finite; None: batches are not skipped, so nothing is said about them.

        Returns:
            Whether any rank's batch is bad; False for None.
        """
        ...


class Weights(ABC):
    """The parameters of a model on one rank. All ranks make the same calls.

    Attributes:
        model: the whole model.
        optimizer: of what this rank steps.
        device: of the forward and backward.
        shares: this rank's part of them; None: they are not divided.
        sharded: the model as it is divided; None: it is not.
        replicas: sums gradients over the ranks; None: there is one rank, or something else does it.
    """

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    shares: Shares | None = None
    sharded: ShardedModel | None = None
    replicas: GradientSum | None = None

    @abstractmethod
    def reduce(self, *, is_bad: bool | None) -> bool:
        """See `GradientSum.reduce`."""

    @property
    @abstractmethod
    def stepped(self) -> Iterable[nn.Parameter]:
        """What the optimizer steps, with the summed gradients after `reduce`."""

    @abstractmethod
    def measure(self, prepare: Prepare, clip: Clip) -> Sequence[Tensor]:
        """Make the summed gradients those that are stepped with, but for the limit of their norm. By all ranks.

        Args:
            prepare: called once for each gradient, here or in `step`.
            clip: limits elements after that.

        Returns:
            Scalars, the norms of whole gradients for `Clip.limited`; empty: it needs none.
        """

    @abstractmethod
    def step(self, clip: Clip, limited: Limited | None) -> None:
        """After `measure`: multiply the gradients by what limits their norm, and step the optimizer, with its hooks."""

    def show(self, wanted: Container[str], prepare: Prepare) -> None:
        """After `reduce`, by all ranks: parameters of these names have their whole summed gradients, in `grad`.

        Args:
            wanted: names.
            prepare: called once for each gradient that is stepped with, here; then not in `measure`.
        """
        prepare([*self.stepped])

    def take_shown(self, wanted: Container[str]) -> None:
        """After `show`: what is stepped takes the gradients that the parameters have now."""
        return

    @abstractmethod
    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """What the optimizer steps, with the names of the parameters that it is or is of."""

    @abstractmethod
    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Names, and values that are finite if the gradients of this rank's batch are; after its backward."""

    def forward(self) -> AbstractContextManager[object]:
        """Around a batch's forward, on a rank without examples too."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[object]:
        """Around a batch's backward, on a rank without examples too."""
        return nullcontext()

    def spread(self) -> None:
        """Give the model its new parameters after a step of the segments that `step` has not made."""
        return

    def clear(self) -> None:
        """Forget the gradients: the batch is over."""
        self.optimizer.zero_grad(set_to_none=True)

    def begin(self, trace: Trace | None = None) -> None:
        """A run begins.

        Args:
            trace: records what moves.
        """
        return

    def begin_batch(self) -> None:
        """Before the first forward of a batch."""
        return

    def end(self) -> None:
        """A run has ended: the model has its parameters."""
        return

    def close(self) -> None:
        """After the last run, or what is left of it."""
        return

    def rest(self) -> None:
        """See `DensePart.rest`."""
        return

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        """See `DensePart.keep_averages`."""
        return False

    def lane_reports(self) -> Mapping[str, LaneReport]:
        """See `LoopPart.lane_reports`."""
        return {}

    def whole(self) -> AbstractContextManager[object]:
        """Inside, between two batches, the model has its parameters."""
        return nullcontext()

    @abstractmethod
    def capture(self, streams: Streams, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]) -> DenseCopy:
        """Start copying what this rank writes into a checkpoint; see `bagpipe.checkpoint.dense_state.capture`."""

    @abstractmethod
    def restore(self, state: DenseState) -> None:
        """Take over the dense state of a checkpoint, of whatever division; before the first run.

        Raises:
            InputError: it is of another model or optimizer.
        """

    @abstractmethod
    def digest(self) -> str:
        """`dense_digest` of the whole model and its optimizer; after `end`."""


class ResidentWeights(Weights):
    """All parameters are here.

    Args:
        model: the whole model.
        optimizer: of its parameters.
        replicas: sums gradients over the ranks; None: there is one rank, or the optimizer's step does it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, replicas: GradientSum | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device_of(model)
        self.replicas = replicas
        self._read()

    def begin(self, trace: Trace | None = None) -> None:
        self._read()

    def _read(self) -> None:
        self._named = tuple(self.model.named_parameters())
        self._stepped = self._of_optimizer()

    def _of_optimizer(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Names and parameters of the model.

        A walk over a model's modules costs as much as a small layer. So they are read once per run, and again when the
        optimizer steps others: a user can replace or add some between two batches.
        """
        now = self._of_optimizer()
        if len(now) != len(self._stepped) or any(map(operator.is_not, now, self._stepped)):
            self._read()
        return self._named

    def reduce(self, *, is_bad: bool | None) -> bool:
        return self.replicas is not None and self.replicas.reduce(is_bad=is_bad)

    @property
    def stepped(self) -> Iterable[nn.Parameter]:
        return (parameter for _, parameter in self._parameters())

    def measure(self, prepare: Prepare, clip: Clip) -> Sequence[Tensor]:
        parameters = [parameter for parameter in self.stepped if parameter.grad is not None]
        prepare(parameters)
        return clip.measure(parameters)

    def step(self, clip: Clip, limited: Limited | None) -> None:
        if limited is not None:
            clip.scale(self.stepped, limited)
        before, after = _hooks_around_step(self.optimizer)
        for hook in before:
            hook(self.optimizer, (), {})
        self.optimizer.step()
        for hook in after:
            hook(self.optimizer, (), {})

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._parameters() if parameter.requires_grad)

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def capture(self, streams: Streams, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]) -> DenseCopy:
        return capture(streams, self.model, self.optimizer, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        state.restore(self.model, self.optimizer)

    def digest(self) -> str:
        return dense_digest(self.model, self.optimizer)


class ShardedWeights(Weights):
    """Each rank has its share.

    Args:
        model: the whole model.
        optimizer: of the shares' segments, and of the model's parameters that are not trained.
        shards: entered by the caller.

    Raises:
        InputError: the optimizer cannot step shares.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, shards: ShardedModel) -> None:
        if isinstance(optimizer, Lamb):
            optimizer.add_up = shards.add_up
        elif type(optimizer) not in _ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise InputError(
                f"dense.shard needs an optimizer that steps each element by itself ({names}), or Lamb, got "
                f"{type(optimizer).__name__}"
            )
        self.model = model
        self.optimizer = optimizer
        self.device = device_of(model)
        self.sharded = self._shards = shards
        self.shares = self._shares = Shares(model, optimizer, shards, is_first=shards.rank == 0)

    def reduce(self, *, is_bad: bool | None) -> bool:
        return self._shards.reduce(is_bad=is_bad)

    @property
    def stepped(self) -> Iterable[nn.Parameter]:
        return self._shards.segments.values()

    def measure(self, prepare: Prepare, clip: Clip) -> Sequence[Tensor]:
        segments = [*self.stepped]
        prepare(segments)
        if not clip.norm and not clip.value:
            return ()
        squares = clip.norms(segments, squares=True)
        return self._shards.whole_norms(squares) if clip.limits_dense else ()

    def step(self, clip: Clip, limited: Limited | None) -> None:
        if limited is not None:
            clip.scale(self.stepped, limited)
        self.optimizer.step()
        self.spread()

    def show(self, wanted: Container[str], prepare: Prepare) -> None:
        super().show(wanted, prepare)
        self._shards.show(wanted)

    def take_shown(self, wanted: Container[str]) -> None:
        self._shards.take_shown(wanted)

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._shards.segments.items()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        return self._shards.largest_gradients()

    def forward(self) -> AbstractContextManager[object]:
        return self._shards.forward()

    def backward(self) -> AbstractContextManager[object]:
        return self._shards.backward()

    def spread(self) -> None:
        self._shards.gather()

    def clear(self) -> None:
        self._shards.clear()

    def begin(self, trace: Trace | None = None) -> None:
        if self._shards.is_whole:
            self._shards.release_model()

    def end(self) -> None:
        self._shards.gather_model()

    @contextmanager
    def whole(self) -> Iterator[None]:
        was_whole = self._shards.is_whole
        if not was_whole:
            self._shards.gather_model()
        try:
            yield
        finally:
            if not was_whole:
                self._shards.release_model()

    def capture(self, streams: Streams, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]) -> DenseCopy:
        return self._shares.capture(streams, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        self._shares.restore(state)

    def digest(self) -> str:
        return state_digest(self.model, self._shards.whole_states(self.optimizer))
