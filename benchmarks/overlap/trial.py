"""One job through the shaped link, as the trainer runs it, measured in steady state.

fill the store with every row ──> cacher process, engine, fenced store over TCP ──> step times after the warm-up, and
waits, rows and bytes on the link between the end of the warm-up and the last measured step
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.kernels.initialization import initial_weights
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import WriteRequest
from bagpipe.training.progress import Progress
from bagpipe.types.schema import RowSchema
from benchmarks.harness.fenced_store import FencedStore
from benchmarks.harness.job import open_engine
from benchmarks.harness.processor_use import ProcessorUse
from benchmarks.harness.shaped_link import ShapedServer
from benchmarks.harness.thread_times import milliseconds, processor_ns
from cacher.embedded import EmbeddedCacher
from trainer.assembly import build_training_model

__all__ = ["DRAIN_STEPS", "LOSS_STEPS", "Trial", "fill_store", "run_trial"]

_FILL_ROWS = 50_000
#: Steps left out at the end: lanes that look ahead have no work left.
DRAIN_STEPS = 16
#: Minimum number of steps of a run.
LOSS_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steady state of one run; figures are per step unless noted.

    Attributes:
        cache_rows: rows in the cache; 0 is direct mode.
        lookahead: batches.
        step_s: times between consecutive steps' ends, seconds to the microsecond.
        exposed_s: wait of the compute lane for rows.
        hit_rate: share of a batch's unique rows that were in the cache.
        rows_unique, rows_fetched: rows.
        received_bytes, sent_bytes: on the link, headers included.
        own_cores, other_cores: average cores used by this job (trainer, cacher, server), and by other jobs.
        processor_ms: processor time of a step by part: threads of this process, and processes beside it.
        loss: sum over the first `LOSS_STEPS` steps; equal for equal work.
    """

    cache_rows: int
    lookahead: int
    step_s: tuple[float, ...]
    exposed_s: float
    hit_rate: float
    rows_unique: float
    rows_fetched: float
    received_bytes: float
    sent_bytes: float
    own_cores: float
    other_cores: float
    processor_ms: Mapping[str, float]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Totals at one moment."""

    progress: Progress
    loss: float
    received_bytes: int
    sent_bytes: int
    processors: ProcessorUse
    parts_ns: Mapping[str, int]


class _Recorder:
    """Records the end time of every step, and the totals after some steps."""

    def __init__(self, server: ShapedServer, cacher: EmbeddedCacher, steps: Sequence[int]) -> None:
        assert cacher.pid is not None, "the cacher runs"
        self._server = server
        self._beside = {"cacher": cacher.pid, "server": server.process_id}
        self._steps = frozenset(steps)
        self.ends_s: list[float] = []
        self.marks: dict[int, _Mark] = {}

    def __call__(self, totals: Callable[[], Progress]) -> None:
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) in self._steps:
            received, sent = self._server.link_bytes()
            progress = totals()
            self.marks[len(self.ends_s)] = _Mark(
                progress=progress,
                loss=float(progress.loss_sum),
                received_bytes=received,
                sent_bytes=sent,
                processors=ProcessorUse.now([os.getpid(), self._server.process_id]),
                parts_ns=processor_ns(self._beside),
            )


def fill_store(server: ShapedServer, schema: RowSchema, namespace: str) -> None:
    """Write every row's initial value past the shaped link, so that every miss is a read."""
    with FencedStore(server.direct_url, schema=schema, namespace=namespace) as store:
        for number, table in enumerate(schema.tables):
            assert table.rows is not None, "the benchmark's tables are bounded"
            for first in range(0, table.rows, _FILL_ROWS):
                ids = np.arange(first, min(first + _FILL_ROWS, table.rows))
                rows = np.zeros((len(ids), schema.row_width(number)), np.float32)
                rows[:, : table.dim] = initial_weights(table, ids, seed=schema.seed).numpy()
                store.write_many([WriteRequest(table=number, ids=ids, rows=rows)])


def run_trial(
    server: ShapedServer, config: Config, *, warmup_steps: int, trace_path: str = "", refill: bool = True
) -> Trial:
    """Train `config.run.steps` batches.

    Args:
        server: holds the rows.
        config: of the job; its store is the server.
        warmup_steps: steps left out at the start, while cache and lookahead window fill up.
        trace_path: write a trace of all lanes here.
        refill: give the store its initial rows first.
    """
    torch.set_num_threads(config.run.threads)
    # Beside the last batches no later ones are read and fetched.
    last_step = config.run.steps - DRAIN_STEPS
    with ExitStack() as stack:
        trace = Trace() if trace_path else None
        cacher = stack.enter_context(EmbeddedCacher(config))
        recorder = _Recorder(server, cacher, (warmup_steps, last_step, LOSS_STEPS))
        source = stack.enter_context(RemoteBatches(cacher.url, config))
        built = build_training_model(config, source.schema)
        if refill:
            fill_store(server, built.rows, config.store.namespace)
        engine = open_engine(built, source, stack, trace=trace)
        engine.train(source.batches("train", built.spec, max_steps=config.run.steps), on_batch=recorder)
        if trace is not None:
            trace.write(trace_path)
    return _trial(config, recorder, warmup_steps, last_step)


def _trial(config: Config, recorder: _Recorder, first: int, last: int) -> Trial:
    """Figures between the ends of steps `first` and `last`, counted from 1."""
    start, end, num_steps = recorder.marks[first], recorder.marks[last], last - first

    def per_step(total: Callable[[_Mark], float]) -> float:
        return (total(end) - total(start)) / num_steps

    own_cores, other_cores = end.processors.cores_since(start.processors)
    unique = per_step(lambda mark: mark.progress.rows_unique)
    return Trial(
        cache_rows=int(config.cache.rows),
        lookahead=config.oracle.lookahead,
        step_s=tuple(np.diff(recorder.ends_s[first - 1 : last]).round(6).tolist()),
        exposed_s=per_step(lambda mark: mark.progress.exposed_s),
        hit_rate=1 - per_step(lambda mark: mark.progress.rows_inserted) / unique,
        rows_unique=unique,
        rows_fetched=per_step(lambda mark: mark.progress.rows_fetched),
        received_bytes=per_step(lambda mark: mark.received_bytes),
        sent_bytes=per_step(lambda mark: mark.sent_bytes),
        own_cores=own_cores,
        other_cores=other_cores,
        processor_ms=milliseconds(start.parts_ns, end.parts_ns, num_steps),
        loss=recorder.marks[LOSS_STEPS].loss,
    )
