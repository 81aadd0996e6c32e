"""`DensePart`, the one interface of the dense model: lanes and handlers, model chunks, loss sums, gradient checks.

    WholeDense    F  B  OPT of the whole model, in one lane     (`bagpipe.training.whole_dense`)
    StagedDense   the lanes of a `StepProgram`                  (`bagpipe.training.staged_dense`)

Other parts see *model chunks*: the whole model, or the stages that this process holds. A chunk is what an optimizer
steps, what a checkpoint copies before its first forward, and what a weight average is kept of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_pieces import Shares
from bagpipe.checkpoint.dense_state import DenseCopy, DenseState, capture
from bagpipe.dense.clip import NO_CLIP, Clip, Limited
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import Streams, keep_for_current_stream
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.digest import dense_digest
from bagpipe.training.part import InFlightBatch, LoopPart, LoopRun
from bagpipe.training.preconditioning import Preconditioning

__all__ = ["DensePart", "ModelChunk"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelChunk:
    """The part of the model that one optimizer steps.

    Attributes:
        name: ``model``, or the stage's number.
        parameters: trainable, with their names in the whole model.
        tensors: names of its parameters and buffers in the whole model; None: all there are.
        optimizer: of the parameters; None if it has none.
        counters: names of the sums of losses of its forwards here.
    """

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]
    tensors: frozenset[str] | None
    optimizer: Optimizer | None
    counters: tuple[str, ...]


class DensePart(LoopPart):
    """Trains the dense part of one model.

    Attributes:
        model: the whole model.
        optimizer: of all its parameters. With stages it has the state of those held here after a run.
        precision: what is computed in which dtype, and the loss scale of the first batch.
        loss_scale: of the batch that is computed.
        clip: limits of gradients, applied before an optimizer's step.
        gradient_norm: scalar, norm of the gradients in the scope of `clip` before it limited them, of the latest batch
            that was not skipped; None: it has no limit of the norm.
        chunks: by name.
        parameters: all that are trained, on whatever rank, by their names in the whole model.
        gradient_points: where gradients of parameters are complete, for the check that they are finite.
        skips_nonfinite: a batch whose loss or a gradient is not finite is left out; otherwise it ends the job. Either
            way it changes nothing that is stored.
        is_staged: the chunks are stages, of which other ranks hold others.
        divided: this rank's shares of the chunks that are divided among ranks, by name.
        preconditioning: K-FAC of the chunks here, a part of the same loop that comes before this one; None: there is
            none.
    """

    name = "dense"
    gradient_points: tuple[Point, ...]
    is_staged: bool = False
    divided: Mapping[str, Shares] = MappingProxyType({})

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        skips_nonfinite: bool = False,
        clip: Clip = NO_CLIP,
        preconditioning: Preconditioning | None = None,
    ) -> None:
        """Raises InputError: the loss scale grows where batches are not left out."""
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.skips_nonfinite = skips_nonfinite
        self.clip = clip
        self.preconditioning = preconditioning
        self.gradient_norm: Tensor | None = None
        self.loss_scale: LossScale = precision.loss_scale
        if self.loss_scale.growth_interval and not skips_nonfinite:
            raise InputError("a loss scale that grows needs batches that can be left out")
        self.chunks: Mapping[str, ModelChunk] = {}
        self.parameters: Mapping[str, nn.Parameter] = {}
        self._run: LoopRun

    @property
    @abstractmethod
    def loss_counters(self) -> tuple[str, ...]:
        """Names of the sums of losses that are counted here."""

    @abstractmethod
    def loss_sums(self, before: int | None = None) -> Mapping[str, Tensor]:
        """Counter -> float64 scalar on the device: the sum of the losses of all examples counted there so far.

        Args:
            before: of the batches before this one, as far as their forwards are done; None: of those that have ended.
        """

    @abstractmethod
    def starts(self, key: OpKey, index: int) -> tuple[str, str, int] | None:
        """(chunk, loss counter, batch) if a forward's action is its operation's first of a batch, else None."""

    @abstractmethod
    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        """Names of the parameters whose gradients are complete at an operation of a check point, and values that are
        finite if these gradients are."""

    def checked_losses(self, point: Point, key: OpKey, b: int) -> Iterable[Tensor]:
        """Losses of a batch that are complete at an operation of a check point, each once; scalars."""
        loss, self._run.in_flight[b].loss = self._run.in_flight[b].loss, None
        return () if loss is None else (loss,)

    @abstractmethod
    def chunk_of(self, key: OpKey) -> ModelChunk | None:
        """The chunk of an operation of `Point.STEP` or `Point.WEIGHTS`; None if it has no parameters."""

    def stepped(self) -> Iterable[tuple[str, Tensor]]:
        """Names and values of what this process steps, where nothing moves them (`rest`)."""
        return (named for chunk in self.chunks.values() for named in chunk.parameters)

    def row_givers(self, b: int) -> Sequence[bool] | None:
        """By rank, whether the backward of a batch reaches rows of its examples; None: all do."""
        return None

    def rest(self) -> None:
        """Before parameters are written, or read together, between two batches: nothing moves them."""

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        """Take over averages of the parameters, by name: they follow each step. False: that is the caller's work."""
        return False

    def capture(
        self, streams: Streams, chunk: str, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]
    ) -> DenseCopy:
        """Start copying what this rank writes of a chunk into a checkpoint; see `bagpipe.checkpoint.dense_state`."""
        own = self.chunks[chunk]
        optimizers = () if own.optimizer is None else (own.optimizer,)
        return capture(streams, self.model, *optimizers, only=own.tensors, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        """Take over the dense state of a checkpoint, before the first run.

        Raises:
            InputError: it is of another model or optimizer.
        """
        state.restore(self.model, *(chunk.optimizer for chunk in self.chunks.values() if chunk.optimizer is not None))

    def digest(self) -> str:
        """`dense_digest` of the whole model and its optimizer; by all ranks, after a run."""
        return dense_digest(self.model, self.optimizer)

    def start(self, run: LoopRun) -> None:
        self._run = run
        self.loss_scale = self.precision.loss_scale.resumed(run.carried)

    def finish_batch(self, b: int) -> None:
        # Not with the step: a checkpoint before b keeps what is counted when rows change, which on ranks is later.
        batch = self._run.in_flight[b]
        batch.loss_scale = self.loss_scale
        self.loss_scale = self.loss_scale.after(is_finite=not batch.is_skipped)

    def scale_of(self, b: int) -> LossScale:
        """The loss scale of a batch, also in a lane that is behind the main one: from any thread."""
        latest, ended = self.loss_scale, self._run.in_flight[b].loss_scale  # in this order: one of them is right
        return latest if ended is None else ended

    def counters(self) -> Mapping[str, Any]:
        return self.loss_scale.carried()

    def limited(self, norms: Sequence[Tensor], batch: InFlightBatch) -> Limited | None:
        """The limit of the norm of all gradients, from the norms given; see `Clip.limited`."""
        for tensor in norms if batch.row_squares is None else (*norms, batch.row_squares):
            keep_for_current_stream(tensor)  # another lane can have made it
        limited = self.clip.limited(norms, batch.row_squares)
        self._note(limited, batch)
        return limited

    def _note(self, limited: Limited | None, batch: InFlightBatch) -> None:
        if limited is not None:
            self.gradient_norm, batch.row_factor = limited.norm.detach(), limited.row_factor
