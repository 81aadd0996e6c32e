"""`Preconditioning`: K-FAC as a part of the loop: its operations, and its state in checkpoints.

    F, REC ──inputs──> COV_A      B, I W ──output gradients──> COV_G       per micro-batch of an instance of a chunk
    REDUCE_COV  X_INV  PRECOND  X_BCAST                                    per chunk (`DensePart.chunks`)
    X_KL        sizes of the steps of all chunks, of which kappa limits the sum
    OPT         that limit; the dense part steps

Ranks own different layers, so each one writes its own state, and a resumed job takes that of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.kfac import Kfac, step_limit
from bagpipe.dense.precondition.layers import LinearLayer
from bagpipe.dense.precondition.step_sizes import StepSizes
from bagpipe.pipeline.interpret import Handler
from bagpipe.training.part import LoopPart, LoopRun

__all__ = ["LayersAt", "Preconditioned", "Preconditioning"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayersAt:
    """Linear layers of a module that computes a chunk: the model, a stage, or a copy of a stage for another pipe.

    Attributes:
        prefix: of its operations: empty, or the number of the stage instance.
        chunk: its name.
        layers: of the module; its own, or those of the copy.
        micro_per_batch: micro-batches of a batch.
        ops: its operations.
        inversions_per_batch: X_INV of a batch: one for each layer, or one for all.
    """

    prefix: str
    chunk: str
    layers: Sequence[LinearLayer]
    micro_per_batch: int
    ops: frozenset[str]
    inversions_per_batch: int


class Preconditioned(Protocol):
    """The dense part whose gradients are preconditioned."""

    def scale_of(self, b: int) -> LossScale:
        """The loss scale of a batch."""
        ...

    def num_examples(self, at: LayersAt, index: int) -> int:
        """Examples of a micro-batch on this rank."""
        ...

    def is_left_out(self, b: int) -> bool:
        """All ranks know by now that a batch is left out."""
        ...

    def show_gradients(self, chunk: str, b: int, names: frozenset[str]) -> None:
        """Have the gradients of these parameters of a chunk, whole and without the loss scale, in `grad`."""
        ...


class Preconditioning(LoopPart):
    """K-FAC of the chunks of a dense part.

    Args:
        kfacs: name of a chunk -> K-FAC of its layers; at least one.
        parameters: of the model, by name.
        sizes: sums the sizes of the steps of all stages; None: the model is one chunk.

    Attributes:
        kfacs: as given.
        layers: names of the parameters of all layers here.
    """

    name = "kfac"

    def __init__(
        self, kfacs: Mapping[str, Kfac], parameters: Mapping[str, nn.Parameter], sizes: StepSizes | None = None
    ) -> None:
        self.kfacs = kfacs
        self.is_divided = any(kfac.is_shared for kfac in kfacs.values())
        names = {id(parameter): name for name, parameter in parameters.items()}
        layers = [layer for kfac in kfacs.values() for layer in kfac.layers]
        self.layers = frozenset(names[id(parameter)] for layer in layers for parameter in layer.parameters)
        self._sizes = sizes
        self._run: LoopRun
        self._dense: Preconditioned
        self._captures: Mapping[str, LayerCapture] = {}
        self._places: Sequence[LayersAt] = ()

    def start(self, run: LoopRun) -> None:
        """Before the dense part starts, which may copy modules with their hooks."""
        self._run = run
        for kfac in self.kfacs.values():
            kfac.begin(run.earlier.dense)

    def attach(self, dense: Preconditioned, places: Sequence[LayersAt]) -> None:
        """Capture the layers of this run; by the dense part, when it starts."""
        self._dense, self._places = dense, places
        self._captures = {at.prefix: self.kfacs[at.chunk].capture(at.layers) for at in places}

    def handlers(self) -> Mapping[str, Handler]:
        calls: Mapping[str, Callable[[LayersAt, int], None]] = {
            "COV_A": self.add_inputs,
            "COV_G": self.add_outputs,
            "REDUCE_COV": self.add_up,
            "X_INV": self.invert,
            "PRECOND": self.precondition,
            "X_BCAST": self.share_gradients,
            "X_KL": self.measure_steps,
        }
        return {
            f"{at.prefix}{op}": partial(call, at) for at in self._places for op, call in calls.items() if op in at.ops
        }

    def capturing(self, prefix: str, forward: Handler) -> Handler:
        """A forward, or its repetition, with the layers of its instance captured."""
        at = next((at for at in self._places if at.prefix == prefix), None)
        return forward if at is None else partial(self._captured, at, forward)

    def _captured(self, at: LayersAt, forward: Handler, index: int) -> None:
        if self.kfacs[at.chunk].makes_factors(index // at.micro_per_batch):
            self._captures[at.prefix].during(index, partial(forward, index))
        else:
            forward(index)

    def add_inputs(self, at: LayersAt, index: int) -> None:
        """COV_A: the inputs of a micro-batch."""
        self._captures[at.prefix].add_inputs(index, index // at.micro_per_batch)

    def add_outputs(self, at: LayersAt, index: int) -> None:
        """COV_G: the output gradients of a micro-batch."""
        b = index // at.micro_per_batch
        factor = self._run.in_flight[b].rank_batch.num_global_examples / self._dense.scale_of(b).value
        num_examples = self._dense.num_examples(at, index)
        self._captures[at.prefix].add_outputs(index, b, factor=factor, num_examples=num_examples)

    def add_up(self, at: LayersAt, b: int) -> None:
        """REDUCE_COV: sums of factors of a batch over the holders."""
        self.collect(at.chunk, b)

    def collect(self, chunk: str, b: int) -> None:
        """Sums of factors of a batch, over the ranks that have the chunk; none of a batch that is left out."""
        if self._dense.is_left_out(b):
            self.kfacs[chunk].drop(b)
        else:
            self.kfacs[chunk].add_up(b)

    def invert(self, at: LayersAt, index: int) -> None:
        """X_INV: the inverses of a layer, or of all."""
        kfac = self.kfacs[at.chunk]
        b, layer = divmod(index, at.inversions_per_batch)
        for number in [layer] if at.inversions_per_batch == len(kfac.layers) else kfac.owned:
            kfac.invert(b, number)

    def precondition(self, at: LayersAt, b: int) -> None:
        """PRECOND: the gradients of own layers."""
        if not self._dense.is_left_out(b):
            self._dense.show_gradients(at.chunk, b, self.layers)
            self.kfacs[at.chunk].precondition()

    def share_gradients(self, at: LayersAt, b: int) -> None:
        """X_BCAST: the gradients of all layers of a chunk."""
        if not self._dense.is_left_out(b):
            self.kfacs[at.chunk].share()

    def measure_steps(self, at: LayersAt, b: int) -> None:
        """X_KL: the size of the step over all chunks."""
        assert self._sizes is not None, "in stages"
        self._sizes.add_up({int(chunk): kfac for chunk, kfac in self.kfacs.items()})

    def limit(self, chunk: str, lr: float) -> None:
        """The preconditioned gradients of a chunk take the place of its gradients, under their limit."""
        kfac = self.kfacs[chunk]
        sizes = kfac.sizes if self._sizes is None else self._sizes.all
        kfac.limit(step_limit(sizes, kappa=kfac.settings.kappa, lr=lr))

    def leave_out(self, chunk: str, b: int) -> None:
        """In place of `limit`: nothing is kept of the gradients of a batch, and if all leave it out, of its factors."""
        self.kfacs[chunk].limit(None)
        if self._run.in_flight[b].is_skipped:
            self.kfacs[chunk].leave_out(b)

    def end(self) -> None:
        for kfac in self.kfacs.values():
            kfac.end()

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        return self.kfacs[chunk].tensors(step) if chunk in self.kfacs else {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return  # a checkpoint that was made of other weights (`bagpipe.start_from`): the factors begin anew
        for kfac in self.kfacs.values():
            kfac.load(tensors)
