"""`Engine`: trains and evaluates a model on planned steps, by walking the prefetch pipeline's actions.

    X_READ   take the next Step, make its index tensors and model inputs      lane data
    X_GET    read its rows from the store                                     lane net-in
    X_EVICT  copy the leaving rows out of their slots                         lane copy
    X_PUT    put the fetched rows into their slots                            lane copy
    F, B     forward, loss, backward                                          lane compute
    X_UPDATE one row-optimizer step per row; OPT: one dense step              lane compute
    X_STORE  write the rows that left                                         lane net-out

A batch under way is one `_Flight`; every handler takes what it needs from it and leaves what the next one needs. Which
lane may do what when is decided by the loop's edges and the plan's two hazards, never here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.batch import Batch
from bagpipe.cache.layout import StepLayout
from bagpipe.cache.rows import RowCache
from bagpipe.cache.step import StepContext, prepare_step
from bagpipe.client.step import Step
from bagpipe.errors import InputError
from bagpipe.pipeline.runner import EndOfBatches, Runner
from bagpipe.pipeline.signals import StopOnSignals
from bagpipe.pipeline.stream import Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.progress import PhaseResult, Progress
from bagpipe.schedule.prefetch import EVICT_AFTER, FETCH_AFTER, prefetch
from bagpipe.store.interface import ReadResult, Store, WriteRequest

__all__ = ["Engine", "EngineSettings", "ModelInputs", "PhaseResult", "Progress"]

#: Batches evicted and not yet acknowledged by the store, at most: bounds the write-back buffers.
WRITE_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model is called with, on the device: ``model(dense, sparse)`` gives logits.

    Attributes:
        dense: ``[num_examples, num_dense]`` in the run's dtype.
        sparse: the batch's ids as the model's embedding modules take them (a KeyedJaggedTensor).
        labels: ``[num_examples]`` in the run's dtype.
    """

    dense: Tensor
    sparse: Any
    labels: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Numbers the engine needs.

    Attributes:
        prefetch_depth: batches fetched ahead.
        rows_lr, eps: of the row optimizer.
    """

    prefetch_depth: int
    rows_lr: float
    eps: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """One batch on its way through the lanes."""

    step: Step
    context: StepContext
    inputs: ModelInputs
    results: list[ReadResult] = field(default_factory=list)
    writes: list[WriteRequest] = field(default_factory=list)
    loss: Tensor | None = None


class Engine:
    """Runs phases of steps over one model, cache and store, all made by the caller and owned by it.

    Args:
        model: called as ``model(dense, sparse)``; its embedding modules read from `cache`.
        layout: how a batch is read (`Converted.layout`).
        cache: the rows.
        store: open, its schema checked.
        optimizer: of the dense part.
        prepare: makes a batch's model inputs; called in the data lane.
        settings: numbers.
        streams: streams of the lanes (default: the host).
        trace: records every action.
        on_batch: called after every batch, in the compute lane, with a function that gives the totals so far.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        layout: StepLayout,
        cache: RowCache,
        store: Store,
        optimizer: torch.optim.Optimizer,
        prepare: Callable[[Batch], ModelInputs],
        settings: EngineSettings,
        streams: Streams | None = None,
        trace: Trace | None = None,
        on_batch: Callable[[Callable[[], Progress]], None] | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.store = store
        self.optimizer = optimizer
        self.prepare = prepare
        self.settings = settings
        self.streams = streams
        self.trace = trace
        self.on_batch = on_batch

    def train(self, steps: Iterator[Step]) -> PhaseResult:
        """Train on the steps and write every updated row back.

        On SIGINT or SIGTERM the batches already read are finished and written back (`PhaseResult.report.stopped`).

        Raises:
            StoreError: the store failed; rows not acknowledged are still dirty in the cache.
        """
        self.model.train()
        result = _Training(self, steps).run()
        self.cache.clear()
        return result

    def evaluate(self, steps: Iterator[Step], on_scores: Callable[[Tensor, Tensor], None]) -> PhaseResult:
        """Score the steps; changes neither model nor rows nor store.

        Args:
            steps: what to score.
            on_scores: called with logits and labels ``[num_examples]`` of every batch, in order, in the compute lane.
        """
        self.model.eval()
        result = _Evaluation(self, steps, on_scores).run()
        self.cache.clear()
        return result


class _Phase(ABC):
    """Handlers shared by training and evaluation, and the totals."""

    train: bool

    def __init__(self, engine: Engine, steps: Iterator[Step]) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.steps = steps
        self.flights: dict[int, _Flight] = {}
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
        settings = self.engine.settings
        loop = prefetch(
            prefetch_depth=settings.prefetch_depth,
            read_ahead=settings.prefetch_depth + 2,
            write_depth=WRITE_DEPTH,
            train=self.train,
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
        )
        with _stop_on_signals(runner):
            runner.run()
            # Still inside: a signal during the last write-back must not lose it.
            self.end()
        return PhaseResult(progress=self.progress(), report=runner.snapshot(), input_error=self.input_error)

    @abstractmethod
    def end(self) -> None:
        """After the last batch."""

    @abstractmethod
    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        """What each op of the loop does."""

    def progress(self) -> Progress:
        report = self.runner.snapshot() if self.runner is not None else None
        return Progress(
            steps=self.num_steps,
            samples=self.samples,
            loss_sum=self.loss_sum,
            rows_unique=self.rows_unique,
            rows_inserted=self.rows_inserted,
            rows_fetched=self.rows_fetched,
            rows_written=self.rows_written,
            elapsed_s=report.wall_s if report is not None else 0.0,
            exposed_s=report.lanes["compute"].waits_s.get("0X_PUT", 0.0) if report is not None else 0.0,
        )

    def read(self, b: int) -> None:
        engine = self.engine
        try:
            step = next(self.steps, None)
        except InputError as error:
            # Not raised here: the batches before are good, so they are trained and written back first.
            self.input_error = error
            step = None
        if step is None:
            raise EndOfBatches
        context = prepare_step(
            engine.layout, step.batch, step.consumer, dtype=engine.cache.schema.dtype, device=engine.cache.device
        )
        self.flights[b] = _Flight(step=step, context=context, inputs=engine.prepare(step.batch))
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

    def forward(self, b: int) -> Tensor:
        """Logits ``[num_examples]``."""
        flight = self.flights[b]
        self.cache.begin(flight.context)
        logits: Tensor = self.engine.model(flight.inputs.dense, flight.inputs.sparse)
        return logits.reshape(-1)

    def loss(self, flight: _Flight, logits: Tensor) -> Tensor:
        """The mean over the global batch, of which this rank's examples are a part."""
        total = nn.functional.binary_cross_entropy_with_logits(logits, flight.inputs.labels, reduction="sum")
        self.loss_sum += total.detach()
        return total / flight.step.num_global_examples

    def _done(self, b: int) -> None:
        flight = self.flights[b]
        self.num_steps += 1
        self.samples += flight.step.batch.num_examples
        self.rows_unique += len(flight.step.consumer.unique)
        self.rows_inserted += len(flight.step.owner.fetch)
        self.finish(b)
        if self.engine.on_batch is not None:
            self.engine.on_batch(self.progress)

    @abstractmethod
    def finish(self, b: int) -> None:
        """The compute lane needs the batch no more."""


class _Training(_Phase):
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
            self.skip_new = self.engine.store.claim()

    def evict(self, b: int) -> None:
        flight = self.flights[b]
        flight.writes = self.cache.evict(flight.step.owner)

    def compute_forward(self, b: int) -> None:
        flight = self.flights[b]
        flight.loss = self.loss(flight, self.forward(b))

    def backward(self, b: int) -> None:
        flight = self.flights[b]
        assert flight.loss is not None, "a batch's forward comes first"
        flight.loss.backward()  # type: ignore[no-untyped-call]
        flight.loss = None

    def update(self, b: int) -> None:
        settings = self.engine.settings
        self.cache.update(self.flights[b].context, lr=settings.rows_lr, eps=settings.eps, step=b + 1)

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

    def finish(self, b: int) -> None:
        # Its write-back may still be under way, and hazards ask for the plans of batches ahead only.
        self.flights.pop(b - WRITE_DEPTH - 1, None)


class _Evaluation(_Phase):
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
        flight = self.flights[b]
        with torch.no_grad():
            logits = self.forward(b)
            self.loss(flight, logits)
        self.on_scores(logits, flight.inputs.labels)

    def end(self) -> None:
        """Nothing changed, so there is nothing to write back."""

    def finish(self, b: int) -> None:
        del self.flights[b]


def _stop_on_signals(runner: Runner) -> AbstractContextManager[object]:
    """Signals reach the main thread only; a job run from another thread is stopped by its caller."""
    if threading.current_thread() is threading.main_thread():
        return StopOnSignals(runner.request_stop)
    return nullcontext()
