"""`Phase`: what training and evaluation share: the batches under way, reading, fetching, the totals, the end."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, prepare_batch
from bagpipe.cache.lookup import ActiveTableGroup
from bagpipe.cache.row_transfer import WRITE_DEPTH, CopiedRows, FetchRequests
from bagpipe.dense.executor import DensePass
from bagpipe.distributed.interface import Peers, StepVote
from bagpipe.errors import InputError, JobError, LostRowError
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.report import Report
from bagpipe.pipeline.runner import EndOfBatches, Runner
from bagpipe.pipeline.signals import StopOnSignals
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.prefetch import EVICT_AFTER, FETCH_AFTER, prefetch
from bagpipe.store.interface import ReadResult
from bagpipe.training.progress import PhaseResult, Progress
from bagpipe.util.failpoints import hit

if TYPE_CHECKING:
    from bagpipe.training.engine import Engine
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["WRITE_DEPTH", "InFlightBatch", "Phase"]

#: How long lanes may stay inside a handler after an error: the store's default deadline of 30 s, and as much again.
_GRACE_S = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightBatch:
    """One batch on its way through the lanes; no inputs if this rank has none of its examples.

    Attributes:
        requests, results: what is read from the store for it, from the fetch to the insert.
        writes: what is to be written back, when it has come from the device.
        epoch: of the logs that its write-back belongs to.
        is_skipped: its loss or gradients are not finite, on some rank, so that it changes nothing.
    """

    rank_batch: RankBatch
    context: BatchContext
    inputs: ModelInputs | None
    requests: FetchRequests | None = None
    results: list[ReadResult] = field(default_factory=list)
    writes: CopiedRows = list
    work: DensePass | None = None
    loss_sum: Tensor | None = None
    groups: tuple[ActiveTableGroup, ...] = ()
    epoch: int = 0
    is_skipped: bool = False


class Phase(ABC):
    """Handlers shared by training and evaluation, and the totals."""

    train: bool
    #: What the compute lane waits for when rows are late.
    row_waits: tuple[str, ...] = ("0X_INSERT",)

    def __init__(
        self,
        engine: Engine,
        batches: Iterator[RankBatch],
        *,
        first_batch: int = 0,
        carried: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.engine = engine
        self.first_batch = first_batch
        self.cache = engine.cache
        self.rank_batches = batches
        self.in_flight: dict[int, InFlightBatch] = {}
        self.next_batch: RankBatch | None = None
        self.gave_up = False  # a batch that this rank had, because of another that has none or stops
        self.read_ahead = engine.settings.read_ahead
        # A batch is read when the one `read_ahead` before it is done: its area is free again.
        self.uploads = engine.cache.uploads(self.read_ahead + 1)
        self.input_error: InputError | None = None
        self.runner: Runner | None = None
        self.skip_new = False
        self.samples: int = carried.get("samples", 0)
        self.num_steps = first_batch
        self.reader_state: Mapping[str, Any] | None = None
        self.num_skipped: int = carried.get("skipped_batches", 0)
        self.loss_sum = torch.full((), carried.get("loss_sum", 0.0), dtype=torch.float64, device=engine.cache.device)
        self.rows_unique = 0
        self.rows_inserted = 0
        self.rows_fetched = 0
        self.rows_written = 0

    def run(self) -> PhaseResult:
        peers = self.engine.peers
        hazards: dict[str, Callable[[int], int]] = {
            EVICT_AFTER: lambda b: self.in_flight[b].rank_batch.owner.evict_after
        }
        if self.train:
            hazards[FETCH_AFTER] = lambda b: self.in_flight[b].rank_batch.owner.fetch_after
        self.runner = runner = Runner(
            self.loop(),
            self.handlers(),
            hazards,
            streams=self.cache.streams,
            trace=self.engine.trace,
            on_batch=self.done,
            agree=self.agree if peers is not None else None,
            # At once: the others are waiting for this rank's part of an exchange.
            on_error=peers.report if peers is not None else None,
            wake=self.engine.wake,
            grace_s=max(_GRACE_S, peers.timeout_s + 10) if peers is not None else _GRACE_S,
            first_batch=self.first_batch,
        )
        self.engine.runner = runner
        try:
            with _stop_on_signals(runner):
                runner.run()
                # Still inside: a signal during the last write-back must not lose it.
                self.end()
                report = runner.snapshot()
                if peers is not None:
                    report = self._settle(peers, report)
        finally:
            self.engine.runner = None
        return PhaseResult(
            progress=self.progress(),
            report=report,
            input_error=self.input_error,
            checkpoint_stall_s=self.stall_s(),
        )

    def _settle(self, peers: Peers, report: Report) -> Report:
        """Every rank has written its rows; what one of them knows, all know."""
        error = str(self.input_error) if self.input_error is not None else None
        ends = peers.gather([report.stopped, error, self.gave_up])
        for rank, (_, found, _) in enumerate(ends):
            if found is not None and self.input_error is None:
                self.input_error = InputError(f"rank {rank}: {found}")
        stopped = any(stopped for stopped, _, _ in ends)
        having_more = [rank for rank, (_, _, gave_up) in enumerate(ends) if gave_up]
        if having_more and not stopped and self.input_error is None:
            raise JobError(f"the data ended at batch {self.num_steps}, but not for ranks {having_more}, who have more")
        return dataclasses.replace(report, stopped=stopped)

    def loop(self) -> Loop:
        """What is run."""
        peers = self.engine.peers
        return prefetch(
            prefetch_depth=self.engine.settings.prefetch_depth,
            read_ahead=self.read_ahead,
            write_depth=WRITE_DEPTH,
            train=self.train,
            ranks=peers.world_size if peers is not None else 1,
            settles=self.train and self.engine.settings.nonfinite == "skip",
        )

    def stall_s(self) -> float:
        """What checkpoints cost the lanes."""
        return 0.0

    @abstractmethod
    def end(self) -> None:
        """After the last batch."""

    @abstractmethod
    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        """What each op of the loop does."""

    def progress(self) -> Progress:
        report = self.runner.snapshot() if self.runner is not None else None
        lanes = [] if report is None else [lane for name, lane in report.lanes.items() if name.startswith("compute")]
        return Progress(
            steps=self.num_steps,
            samples=self.samples,
            loss_sum=self.total_loss(),
            rows_unique=self.rows_unique,
            rows_inserted=self.rows_inserted,
            rows_fetched=self.rows_fetched,
            rows_written=self.rows_written,
            elapsed_s=report.wall_s if report is not None else 0.0,
            exposed_s=sum(lane.waits_s.get(op, 0.0) for lane in lanes for op in self.row_waits),
            skipped_batches=self.num_skipped,
        )

    def take(self) -> None:
        """The next batch, if there is one."""
        try:
            self.next_batch = next(self.rank_batches, None)
        except InputError as error:
            # Not raised here: the batches before are good, so they are trained and written back first.
            self.input_error = error
            self.next_batch = None

    def agree(self, stop: bool) -> bool:
        """Before each batch: take it, and give it up if another rank has none or stops."""
        assert self.engine.peers is not None, "one rank agrees with itself"
        self.take()
        wish = StepVote.STOP if stop else StepVote.GO if self.next_batch is not None else StepVote.END
        strongest = self.engine.peers.agree(wish)
        if strongest is not StepVote.GO:
            self.gave_up = self.next_batch is not None
            self.next_batch = None
        return strongest is StepVote.STOP

    def read(self, b: int) -> None:
        engine = self.engine
        if engine.peers is None:
            self.take()
        rank_batch, self.next_batch = self.next_batch, None
        if rank_batch is None:
            raise EndOfBatches
        # The data lane waited for the end of batch b - read_ahead on the device, so nothing there uses these any more.
        self.in_flight.pop(b - self.read_ahead - WRITE_DEPTH - 1, None)
        with self.uploads.batch() as upload:
            context = prepare_batch(
                engine.layout, rank_batch.batch, rank_batch.consumer, rank_batch.exchange, upload=upload
            )
            inputs = engine.prepare(rank_batch.batch, upload) if rank_batch.batch.num_examples else None
        self.in_flight[b] = InFlightBatch(rank_batch=rank_batch, context=context, inputs=inputs)
        if engine.trace is not None:
            span = rank_batch.span
            engine.trace.note("oracle", "0X_PLAN", b, span.plan_start_ns, span.plan_end_ns)

    def get(self, b: int) -> None:
        flight = self.in_flight[b]
        flight.requests = requests = FetchRequests.of(flight.rank_batch.owner, skip_new=self.skip_new)
        flight.results = self.engine.store.read_many(requests.reads)
        hit("after-fetch")
        self.check_found(b, requests.reads)
        self.rows_fetched += requests.num_rows

    def check_found(self, b: int, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Raise LostRowError if a row that was written before is not in the store: names the first one."""
        for (table, ids), result in zip(requests, self.in_flight[b].results, strict=True):
            if result.found.all():
                continue
            missing = ids[~result.found]
            is_lost = self.was_written(b, table, missing)
            if is_lost.any():
                name = self.cache.schema.tables[table].name
                raise LostRowError(
                    f"table {name} id {int(missing[np.argmax(is_lost)])} was written, but is not in the store any more "
                    f"({int(np.count_nonzero(is_lost))} such rows in one batch)"
                )

    def was_written(self, b: int, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows that batch b fetches must be in the store, bool ``[n]``.

        Asked is who wrote them, not the plan: a row that was planned but never updated was not written.
        """
        known, recorder = self.engine.known, self.engine.recorder
        found = np.zeros(len(ids), dtype=np.bool_) if known is None else known(table, ids)
        return found if recorder is None else found | recorder.written.contains(table, ids)

    def put(self, b: int) -> None:
        flight = self.in_flight[b]
        assert flight.requests is not None, "fetched before"
        self.cache.insert(flight.rank_batch.owner, flight.requests, flight.results)
        self.cache.check(flight.context)
        flight.requests, flight.results = None, []

    def begin(self, context: BatchContext) -> None:
        """The batch's rows are here: the embedding modules may read them."""
        self.cache.begin(context)

    def add_loss(self, b: int) -> None:
        """The batch counts."""
        flight = self.in_flight[b]
        if flight.loss_sum is not None:
            self.loss_sum += flight.loss_sum
            flight.loss_sum = None

    def total_loss(self) -> Tensor:
        """Float64 scalar: the sum of all examples' losses so far."""
        return self.loss_sum

    def done(self, b: int) -> None:
        """The compute lane is done with the batch."""
        flight = self.in_flight[b]
        self.num_steps += 1
        self.reader_state = flight.rank_batch.batch.reader_state
        if flight.is_skipped:
            self.num_skipped += 1
        else:
            self.samples += flight.rank_batch.batch.num_examples
        # With several ranks, each counts the rows it owns, so that their sum counts a row once.
        exchange = flight.rank_batch.exchange
        self.rows_unique += len(flight.rank_batch.consumer.unique if exchange is None else exchange.owned)
        self.rows_inserted += len(flight.rank_batch.owner.fetch)
        if self.engine.on_batch is not None:
            self.engine.on_batch(self.progress)


def _stop_on_signals(runner: Runner) -> AbstractContextManager[object]:
    """Signals reach the main thread only; a job run from another thread is stopped by its caller."""
    if threading.current_thread() is threading.main_thread():
        return StopOnSignals(runner.request_stop)
    return nullcontext()
