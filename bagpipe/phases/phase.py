"""The phases of an engine, training and evaluation: what each action of the prefetch pipeline does.

    X_READ   take the next Step, make its index tensors and model inputs      lane data
    X_GET    read its rows from the store                                     lane net-in
    X_EVICT  copy the leaving rows out of their slots                         lane copy
    X_PUT    put the fetched rows into their slots                            lane copy
    F, B     forward, loss, backward                                          lane compute
    X_UPDATE one row-optimizer step per row; OPT: one dense step              lane compute
    X_STORE  write the rows that left                                         lane net-out

and with several ranks, whose caches hold different rows (`bagpipe.cache.exchange`):

    X_PREPULL, X_PULL            rows from their owners                       lane pull
    X_PUSH, X_PUSH_LATE, X_UPDATE_LATE   row gradients to their owners        lane push
    X_ACK    every rank has written the rows that left                        lane ack

A batch under way is one `_Flight`; every handler takes what it needs from it and leaves what the next one needs. Which
lane may do what when is decided by the loop's edges and the plan's two hazards, never here.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bagpipe.cache.exchange import RowExchange
from bagpipe.cache.lookup import ActiveRun
from bagpipe.cache.rows import RowStep
from bagpipe.cache.step import StepContext, prepare_step
from bagpipe.client.step import Step
from bagpipe.errors import InputError
from bagpipe.peers.interface import Peers, Wish
from bagpipe.pipeline.report import Report
from bagpipe.pipeline.runner import EndOfBatches, Runner
from bagpipe.pipeline.signals import StopOnSignals
from bagpipe.progress import PhaseResult, Progress
from bagpipe.schedule.prefetch import EVICT_AFTER, FETCH_AFTER, prefetch
from bagpipe.store.interface import ReadResult, WriteRequest

if TYPE_CHECKING:
    from bagpipe.engine import Engine, ModelInputs

__all__ = ["Evaluation", "EvaluationOfRanks", "Training", "TrainingOfRanks"]

#: Batches evicted and not yet acknowledged by the store, at most: bounds the write-back buffers.
WRITE_DEPTH = 4

#: How long lanes may stay inside a handler after an error: the store's default deadline of 30 s, and as much again.
_GRACE_S = 60.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """One batch on its way through the lanes; no inputs if this rank has none of its examples."""

    step: Step
    context: StepContext
    inputs: ModelInputs | None
    results: list[ReadResult] = field(default_factory=list)
    writes: list[WriteRequest] = field(default_factory=list)
    loss: Tensor | None = None
    runs: tuple[ActiveRun, ...] = ()


class Phase(ABC):
    """Handlers shared by training and evaluation, and the totals."""

    train: bool
    #: What the compute lane waits for when rows are late.
    row_waits: tuple[str, ...] = ("0X_PUT",)

    def __init__(self, engine: Engine, steps: Iterator[Step]) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.steps = steps
        self.flights: dict[int, _Flight] = {}
        self.next_step: Step | None = None
        self.read_ahead = engine.settings.read_ahead
        self.input_error: InputError | None = None
        self.runner: Runner | None = None
        self.skip_new = False
        self.samples = 0
        self.num_steps = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=engine.cache.device)
        self.rows_unique = 0
        self.rows_inserted = 0
        self.rows_fetched = 0
        self.rows_written = 0

    def run(self) -> PhaseResult:
        settings, peers = self.engine.settings, self.engine.peers
        loop = prefetch(
            prefetch_depth=settings.prefetch_depth,
            read_ahead=self.read_ahead,
            write_depth=WRITE_DEPTH,
            train=self.train,
            ranks=peers.world_size if peers is not None else 1,
        )
        hazards: dict[str, Callable[[int], int]] = {EVICT_AFTER: lambda b: self.flights[b].step.owner.evict_after}
        if self.train:
            hazards[FETCH_AFTER] = lambda b: self.flights[b].step.owner.fetch_after
        self.runner = runner = Runner(
            loop,
            self.handlers(),
            hazards,
            streams=self.engine.streams,
            trace=self.engine.trace,
            on_batch=self._done,
            agree=self.agree if peers is not None else None,
            # At once: the others are waiting for this rank's part of an exchange.
            on_error=peers.report if peers is not None else None,
            grace_s=max(_GRACE_S, peers.timeout_s + 10) if peers is not None else _GRACE_S,
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
        return PhaseResult(progress=self.progress(), report=report, input_error=self.input_error)

    def _settle(self, peers: Peers, report: Report) -> Report:
        """Every rank has written its rows; what one of them knows, all know."""
        error = str(self.input_error) if self.input_error is not None else None
        ends = peers.gather([report.stopped, error])
        for rank, (_, found) in enumerate(ends):
            if found is not None and self.input_error is None:
                self.input_error = InputError(f"rank {rank}: {found}")
        return dataclasses.replace(report, stopped=any(stopped for stopped, _ in ends))

    @abstractmethod
    def end(self) -> None:
        """After the last batch."""

    @abstractmethod
    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        """What each op of the loop does."""

    def progress(self) -> Progress:
        report = self.runner.snapshot() if self.runner is not None else None
        waits_s = report.lanes["compute"].waits_s if report is not None else {}
        return Progress(
            steps=self.num_steps,
            samples=self.samples,
            loss_sum=self.loss_sum,
            rows_unique=self.rows_unique,
            rows_inserted=self.rows_inserted,
            rows_fetched=self.rows_fetched,
            rows_written=self.rows_written,
            elapsed_s=report.wall_s if report is not None else 0.0,
            exposed_s=sum(waits_s.get(op, 0.0) for op in self.row_waits),
        )

    def take(self) -> None:
        """The next step, if there is one."""
        try:
            self.next_step = next(self.steps, None)
        except InputError as error:
            # Not raised here: the batches before are good, so they are trained and written back first.
            self.input_error = error
            self.next_step = None

    def agree(self, stop: bool) -> bool:
        """Before each batch: take its step, and give it up if another rank has none or stops."""
        assert self.engine.peers is not None, "one rank agrees with itself"
        self.take()
        wish = Wish.STOP if stop else Wish.GO if self.next_step is not None else Wish.END
        strongest = self.engine.peers.agree(wish)
        if strongest is not Wish.GO:
            self.next_step = None
        return strongest is Wish.STOP

    def read(self, b: int) -> None:
        engine = self.engine
        if engine.peers is None:
            self.take()
        step, self.next_step = self.next_step, None
        if step is None:
            raise EndOfBatches
        # The data lane waited for the end of batch b - read_ahead on the device, so nothing there uses these any more.
        self.flights.pop(b - self.read_ahead - WRITE_DEPTH - 1, None)
        context = prepare_step(
            engine.layout,
            step.batch,
            step.consumer,
            step.exchange,
            dtype=engine.cache.schema.dtype,
            device=engine.cache.device,
        )
        inputs = engine.prepare(step.batch) if step.batch.num_examples else None
        self.flights[b] = _Flight(step=step, context=context, inputs=inputs)
        if engine.trace is not None:
            span = step.span
            engine.trace.note("oracle", "0X_PLAN", b, span.plan_start_ns, span.plan_end_ns)

    def get(self, b: int) -> None:
        flight = self.flights[b]
        requests = self.cache.fetch_requests(flight.step.owner, skip_new=self.skip_new)
        flight.results = self.engine.store.read_many(requests)
        self.rows_fetched += sum(len(ids) for _, ids in requests)

    def put(self, b: int) -> None:
        flight = self.flights[b]
        self.cache.insert(flight.step.owner, flight.results, skip_new=self.skip_new)
        flight.results = []

    def begin(self, context: StepContext) -> None:
        """The batch's rows are here: the embedding modules may read them."""
        self.cache.begin(context)

    def forward(self, b: int) -> tuple[Tensor, Tensor] | None:
        """Logits and labels ``[num_examples]``; None without examples, for few models take an empty batch."""
        flight = self.flights[b]
        self.begin(flight.context)
        if flight.inputs is None:
            return None
        logits: Tensor = self.engine.model(flight.inputs.dense, flight.inputs.sparse)
        return logits.reshape(-1), flight.inputs.labels

    def loss(self, b: int, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the global batch, of which this rank's examples are a part."""
        total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self.loss_sum += total.detach()
        return total / self.flights[b].step.num_global_examples

    def _done(self, b: int) -> None:
        flight = self.flights[b]
        self.num_steps += 1
        self.samples += flight.step.batch.num_examples
        # With several ranks, each counts the rows it owns, so that their sum counts a row once.
        exchange = flight.step.exchange
        self.rows_unique += len(flight.step.consumer.unique if exchange is None else exchange.owned)
        self.rows_inserted += len(flight.step.owner.fetch)
        if self.engine.on_batch is not None:
            self.engine.on_batch(self.progress)


class Training(Phase):
    train = True

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {
            "X_READ": self.read,
            "X_GET": self.get,
            "X_EVICT": self.evict,
            "X_PUT": self.put,
            "F": self.compute_forward,
            "B": self.backward,
            "X_UPDATE": self.update,
            "OPT": self.dense_step,
            "X_STORE": self.store,
        }

    def read(self, b: int) -> None:
        super().read(b)
        if b == 0:
            # Only now: bad input must leave the store untouched. A namespace made by this job holds no rows yet.
            self.skip_new = self.engine.claim()

    def evict(self, b: int) -> None:
        flight = self.flights[b]
        flight.writes = self.cache.evict(flight.step.owner)

    def compute_forward(self, b: int) -> None:
        scored = self.forward(b)
        self.flights[b].loss = None if scored is None else self.loss(b, *scored)

    def backward(self, b: int) -> None:
        flight = self.flights[b]
        if flight.loss is not None:
            flight.loss.backward()  # type: ignore[no-untyped-call]
            flight.loss = None

    def row_step(self, b: int) -> RowStep:
        settings = self.engine.settings
        return RowStep(lr=settings.rows_lr, eps=settings.eps, step=b + 1)

    def update(self, b: int) -> None:
        self.cache.update(self.flights[b].context, self.row_step(b))

    def dense_step(self, b: int) -> None:
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad(set_to_none=True)

    def store(self, b: int) -> None:
        flight = self.flights[b]
        self.engine.store.write_many(flight.writes)
        self.rows_written += sum(len(request.ids) for request in flight.writes)
        flight.writes = []

    def end(self) -> None:
        """Write back what is still dirty."""
        for requests in self.cache.flush():
            self.engine.store.write_many(requests)
            self.rows_written += sum(len(request.ids) for request in requests)


class TrainingOfRanks(Training):
    """Rows and gradients travel between the ranks."""

    row_waits = ("0X_PUT", "0X_PULL", "0X_PUSH")

    def __init__(self, engine: Engine, steps: Iterator[Step]) -> None:
        super().__init__(engine, steps)
        assert engine.peers is not None, "one rank trains without"
        self.peers = engine.peers
        self.exchange = RowExchange(engine.cache, engine.peers)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {
            **super().handlers(),
            "X_PREPULL": lambda b: self.exchange.early(self.flights[b].context),
            "X_PULL": lambda b: self.exchange.pull(self.flights[b].context),
            "X_PUSH": self.push,
            "X_PUSH_LATE": lambda b: self.exchange.push_late(self.flights[b].runs),
            "X_UPDATE_LATE": lambda b: self.exchange.update_late(self.flights[b].context, self.row_step(b)),
            "X_ACK": lambda b: self.peers.acknowledge(),
        }

    def begin(self, context: StepContext) -> None:
        self.exchange.begin(context)

    def push(self, b: int) -> None:
        flight = self.flights[b]
        flight.runs = self.exchange.push(flight.context)

    def update(self, b: int) -> None:
        self.exchange.update(self.flights[b].context, self.row_step(b))


class Evaluation(Phase):
    train = False

    def __init__(self, engine: Engine, steps: Iterator[Step], on_scores: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(engine, steps)
        self.on_scores = on_scores

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {"X_READ": self.read, "X_GET": self.get, "X_PUT": self.replace, "F": self.score}

    def replace(self, b: int) -> None:
        """Rows are clean, so those that leave are simply forgotten."""
        self.cache.evict(self.flights[b].step.owner)
        self.put(b)

    def score(self, b: int) -> None:
        with torch.no_grad():
            scored = self.forward(b)
            if scored is not None:
                self.loss(b, *scored)
                self.on_scores(*scored)

    def end(self) -> None:
        """Nothing changed, so there is nothing to write back."""


class EvaluationOfRanks(Evaluation):
    """Rows travel to the ranks that use them; nothing changes them, so all of a batch's rows travel ahead."""

    row_waits = ("0X_PREPULL",)

    def __init__(self, engine: Engine, steps: Iterator[Step], on_scores: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(engine, steps, on_scores)
        assert engine.peers is not None, "one rank scores without"
        self.exchange = RowExchange(engine.cache, engine.peers)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {**super().handlers(), "X_PREPULL": self.pull}

    def begin(self, context: StepContext) -> None:
        self.exchange.begin(context)

    def pull(self, b: int) -> None:
        context = self.flights[b].context
        self.exchange.early(context)
        self.exchange.pull(context)


def _stop_on_signals(runner: Runner) -> AbstractContextManager[object]:
    """Signals reach the main thread only; a job run from another thread is stopped by its caller."""
    if threading.current_thread() is threading.main_thread():
        return StopOnSignals(runner.request_stop)
    return nullcontext()
