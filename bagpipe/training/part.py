"""`LoopPart`: one summand of a loop; and how the summands become one loop with one handler per action.

    parts ──declare──> LoopBuilder ──build──> Composition: the loop, checked as one program
      └────handlers, hooks, hazards──> handlers_of(parts, composition) ──> Runner

A part contributes lanes and edges of its own (`declare`, with a handler for each of its operations), or work before and
after another part's operations (`hooks`, at a `Point`), or both. It needs no knowledge of the other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from bagpipe.cache.batch_context import BatchContext
from bagpipe.cache.lookup import ActiveTableGroup
from bagpipe.cache.row_transfer import CopiedRows, FetchRequests
from bagpipe.checkpoint.dense_state import PART
from bagpipe.dense.executor import DensePass
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import ScheduleError
from bagpipe.kernels.interface import RowSteps
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.free_order import LaneOrder
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.stage.batches import StageBatch
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.loop_builder import Composition, LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.interface import DeleteRequest, ReadResult, WriteRequest

__all__ = ["EarlierSteps", "Hook", "InFlightBatch", "LoopPart", "LoopRun", "handlers_of"]


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightBatch:
    """One batch between its reading and its write-back. Parts pass their results on through it.

    Attributes:
        rank_batch: the batch and its plan.
        context: its index tensors.
        inputs: of the dense part (`DenseExecutor.forward`); None if this rank has none of its examples.
        requests, results: what is read from the store for it, from the fetch to the insert.
        rows_found: rows that the store had, from the fetch on.
        writes: gives the rows to write back, once they have come from the device; None: not evicted, or written.
        epoch: of the logs that its write-back belongs to.
        groups: its table groups, from the first lookup on; with their gradients after the backward.
        row_steps: settings of its row updates, from the first lookup on.
        row_squares: squared norm of its rows' gradients, float64 scalar, of all ranks; None: their norm has no limit.
        row_factor: what that limit multiplies them by, from the dense step on; None: 1.
        dense_pass: between forward and backward of a whole model.
        stage_batch: as the stages of a model divide it; None for a whole model.
        loss: scalar without history, the mean over the global batch of these examples; None without examples.
        loss_sum: scalar, the sum over these examples, until it is counted.
        norms: by local stage of a model whose stages agree on a batch: float64 ``[parameters]``, see `Agreement.reach`.
        all_norms: of the gradients of all stages, scalars in the order of the model's parameters.
        is_reached: by local stage, whether any example's backward reached it.
        is_skipped: its loss or gradients are not finite, on some rank, so it changes nothing.
        loss_scale: of its gradients, from its end in the main compute lane on; before it is that of the dense part.
    """

    rank_batch: RankBatch
    context: BatchContext
    inputs: Any
    requests: FetchRequests | None = None
    results: list[ReadResult] = field(default_factory=list)
    rows_found: int = 0
    writes: CopiedRows | None = None
    epoch: int = 0
    groups: tuple[ActiveTableGroup, ...] = ()
    row_steps: RowSteps = ()
    row_squares: Tensor | None = None
    row_factor: Tensor | None = None
    dense_pass: DensePass | None = None
    stage_batch: StageBatch | None = None
    loss: Tensor | None = None
    loss_sum: Tensor | None = None
    norms: dict[int, Tensor] = field(default_factory=dict)
    all_norms: tuple[Tensor, ...] = ()
    is_reached: dict[int, bool] = field(default_factory=dict)
    is_skipped: bool = False
    loss_scale: LossScale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSteps:
    """Batches of earlier jobs that a job goes on counting (`bagpipe.start_from`); its own begin at 0.

    Attributes:
        rows: in the steps of row optimizers.
        schedule: in the positions of learning rates.
        dense: in the turns of the dense part: of K-FAC, of versions of weights, of partial backwards.
        masks: in the seeds of the stages' random numbers.
    """

    rows: int = 0
    schedule: int = 0
    dense: int = 0
    masks: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LoopRun:
    """One run of a loop over some batches, as its parts see it.

    Attributes:
        batches: what is still to be read.
        parts: all parts of the loop, in their order.
        first_batch: number of the first batch.
        carried: counters of the checkpoint that the job resumes; empty for a fresh start.
        earlier: steps of earlier jobs.
        in_flight: the batches under way, by number.
        runner: walks the loop; set once, before the first handler is called.
        trace: of the run; parts that work in threads of their own add to it.
    """

    batches: Iterator[RankBatch]
    parts: Sequence[LoopPart]
    first_batch: int = 0
    carried: Mapping[str, Any] = field(default_factory=dict)
    earlier: EarlierSteps = EarlierSteps()
    in_flight: dict[int, InFlightBatch] = field(default_factory=dict)
    runner: Runner | None = None
    trace: Trace | None = None

    def at_rest(self) -> LoopRun:
        """The run for checkpoints once this one is left: its parts, without batches and runner."""
        return replace(self, batches=iter(()), in_flight={}, runner=None)

    def abort(self, error: BaseException) -> None:
        """End the run with this error, unless it has one. From any thread."""
        if self.runner is not None:
            self.runner.abort(error)

    def first_error(self) -> BaseException | None:
        """The run's first error."""
        return None if self.runner is None else self.runner.first_error()

    def counters(self) -> Mapping[str, Any]:
        """The counters of all parts."""
        return {name: value for part in self.parts for name, value in part.counters().items()}

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        """The tensors that parts keep beside a chunk of the dense part before batch `step`, by ``part.name``."""
        return {
            f"{part.name}.{name}": tensor for part in self.parts for name, tensor in part.tensors(chunk, step).items()
        }

    def pieces(self, chunk: str) -> Mapping[str, Piece]:
        """Of `tensors`, those that are pieces of tensors, by full name."""
        return {f"{PART}{part.name}.{name}": piece for part in self.parts for name, piece in part.pieces(chunk).items()}

    def of_this_rank(self, names: Iterable[str]) -> frozenset[str]:
        """Of the names of `tensors`, the full names of those of parts that are divided among the ranks."""
        divided = tuple(f"{part.name}." for part in self.parts if part.is_divided)
        return frozenset(f"{PART}{name}" for name in names if name.startswith(divided))

    @property
    def keeps_rows(self) -> bool:
        """Whether a part has `LoopPart.row_tensors`."""
        return any(part.keeps_rows for part in self.parts)

    def row_tensors(self) -> Mapping[str, Tensor]:
        """The tensors that parts keep of this rank's rows, by ``part.name``."""
        return {f"{part.name}.{name}": tensor for part in self.parts for name, tensor in part.row_tensors().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """Work in the action of another part.

    Attributes:
        at: the point whose operations are extended.
        when: before or after what is done there already; hooks of a part listed later come later.
        call: ``call((stage, op), index)``, with the operation's name in the program and the action's index.
    """

    at: Point
    when: Literal["before", "after"]
    call: Callable[[OpKey, int], None]


class LoopPart:
    """One summand of a loop. Every method does nothing here; a part overrides what it needs.

    Order of the calls: `start` when a run begins; `declare`, `handlers`, `hazards` and `hooks` to compose its loop;
    handlers and hooks in the lanes, `finish_batch` in the lane of the loop's sink, `before_write`, `after_write` and
    `after_delete` around every write-back; `roll_back` when a batch is given up between two micro-batches; when all
    lanes have ended `before_flush`, the last write-backs, and `end`.
    """

    #: Names the part's state in checkpoints.
    name: str = ""
    #: Operations that bring rows late if the compute lane waits for them: the time is counted as exposed.
    row_waits: tuple[str, ...] = ()
    #: The part has `row_tensors`.
    keeps_rows: bool = False
    #: Ranks have different `tensors` of one chunk. `load_tensors` gets those of all ranks.
    is_divided: bool = False

    def declare(self, loop: LoopBuilder) -> None:
        """Contribute lanes, edges and points."""

    def handlers(self) -> Mapping[str, Handler]:
        """``X_READ`` or ``0X_READ`` -> function of the action's index, for the part's own operations."""
        return {}

    def hazards(self) -> Mapping[str, Callable[[int], int]]:
        """Hazard -> function of the waiting batch giving the batch to wait for, -1 for none."""
        return {}

    def orders(self) -> Mapping[str, LaneOrder]:
        """Lane with tracks -> its orders, given or taken down."""
        return {}

    def hooks(self) -> Iterable[Hook]:
        """Work in the actions of other parts."""
        return ()

    def start(self, run: LoopRun) -> None:
        """A run begins: forget the one before."""

    def finish_batch(self, b: int) -> None:
        """The last action of batch b in the main compute lane is done."""

    def before_write(self, epoch: int) -> None:
        """Rows that left the cache in an epoch are about to be written; in lane net-out, or at the end."""

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, b: int) -> None:
        """The store has acknowledged rows that left the cache in an epoch, for batch b."""

    def after_delete(self, requests: Sequence[DeleteRequest], epoch: int, b: int) -> None:
        """The store has deleted rows that expired before batch b; in an epoch, as `after_write`."""

    def roll_back(self) -> None:
        """Undo what the micro-batches of a batch have changed whose step is not done, and forget it; no lane acts."""

    def before_flush(self) -> None:
        """All lanes have ended; the dirty rows are about to be written."""

    def end(self) -> None:
        """The run is over. Called in the order of the parts."""

    def close(self) -> None:
        """The run is left, after `end` or an error: end the threads that it began. Lanes have ended. Must not fail."""

    def counters(self) -> Mapping[str, Any]:
        """Numbers of the batches done, JSON-able, that a checkpoint keeps: `LoopRun.carried` of a resumed job."""
        return {}

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        """Tensors that a checkpoint before batch `step` keeps beside a chunk (`DensePart.chunks`), by name."""
        return {}

    def pieces(self, chunk: str) -> Mapping[str, Piece]:
        """Those of `tensors` that are a rank's elements of a tensor: what elements, by name. Checkpoints join them."""
        return {}

    def lane_reports(self) -> Mapping[str, LaneReport]:
        """Times of lanes that the part has besides those of the loop, by name; and what is to be added to others'."""
        return {}

    def row_tensors(self) -> Mapping[str, Tensor]:
        """Tensors of this rank's rows that a checkpoint keeps, by name; after the row updates of a batch.

        Names differ between ranks. `load_tensors` gets those of all ranks, which hold stages then.
        """
        return {}

    def share(self, stages: Sequence[HeldStage], group: RankGroup) -> None:
        """Give all ranks the part's tensors as each stage's first holder has them; by all ranks alike, after training.

        Args:
            stages: who holds which stage.
            group: all ranks of the job.

        Raises:
            PeerError: a rank is gone or silent.
        """

    def evaluating(self) -> AbstractContextManager[object]:
        """Context of every evaluation of the model."""
        return nullcontext()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the tensors of all chunks, on the host, as a checkpoint kept them.

        Raises:
            InputError: they do not fit.
        """


def handlers_of(parts: Sequence[LoopPart], composition: Composition) -> Mapping[str, Handler]:
    """One handler per operation of a composed loop: the hooks before it, its part's own, the hooks after it.

    Raises:
        ScheduleError: two parts handle one operation, or a hook is at a point or operation that no part provides.
    """
    own: dict[str, Handler] = {}
    owners: dict[str, LoopPart] = {}
    for part in parts:
        for text, handler in part.handlers().items():
            if text in own:
                raise ScheduleError(f"{type(owners[text]).__name__} and {type(part).__name__} both handle {text}")
            own[text], owners[text] = handler, part
    calls: dict[str, tuple[list[Handler], list[Handler]]] = {}
    for hook in (hook for part in parts for hook in part.hooks()):
        for key in composition.operations(hook.at):
            names = [name for name in (f"{key[0]}{key[1]}", key[1]) if name in own]
            if not names:
                raise ScheduleError(f"point {hook.at.value!r}: no part handles {key[0]}{key[1]}")
            before, after = calls.setdefault(names[0], ([], []))
            (before if hook.when == "before" else after).append(partial(hook.call, key))
    for text, (before, after) in calls.items():
        own[text] = _chain((*before, own[text], *after))
    return own


def _chain(calls: tuple[Handler, ...]) -> Handler:
    def handler(index: int) -> None:
        for call in calls:
            call(index)

    return handler
