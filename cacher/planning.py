"""`PlannedData`: a data source with the oracle on top. In one process; `service` puts it behind a socket."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator

from bagpipe.batch import Batch
from bagpipe.client.step import Phase, PlanSpan, Step
from bagpipe.config import DataConfig
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import Planner, make_planner
from data.formats import open_source
from data.loader import LookaheadLoader, open_loader

__all__ = ["PlannedData"]


class PlannedData:
    """Steps of a data set, planned in the calling process. Implements `bagpipe.client.step.StepSource`.

    Args:
        config: what to read.
        seed: seed of the data order (and of synthetic data).

    Raises:
        InputError: the data cannot be opened.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._source = open_source(config, seed)
        self._skipped_rows = 0
        self.schema = self._source.schema

    def steps(self, phase: Phase, spec: OracleSpec, *, max_steps: int = 0) -> Iterator[Step]:
        """Steps of a phase in batch order, see `StepSource`."""
        return itertools.islice(self._steps(phase, spec), max_steps or None)

    def _steps(self, phase: Phase, spec: OracleSpec) -> Iterator[Step]:
        planner = make_planner(spec)
        window: deque[tuple[Batch, int]] = deque()  # batch, and when its reading began
        with self._loader(phase) as loader:
            batches = iter(loader)
            while True:
                read_start_ns = time.monotonic_ns()
                batch = next(batches, None)
                self._skipped_rows = loader.skipped_rows()
                if batch is None:
                    break
                planner.push(batch)
                window.append((batch, read_start_ns))
                if planner.is_ready:
                    yield _plan(planner, window)
            while window:
                yield _plan(planner, window)

    def skipped_rows(self) -> int:
        """Malformed rows skipped so far."""
        return self._skipped_rows

    def _loader(self, phase: Phase) -> LookaheadLoader:
        return open_loader(self._config, seed=self._seed, phase=phase, source=self._source)


def _plan(planner: Planner | DirectPlanner, window: deque[tuple[Batch, int]]) -> Step:
    start_ns = time.monotonic_ns()
    plan = planner.plan()
    batch, read_start_ns = window.popleft()
    return Step(
        batch=batch,
        consumer=plan.consumers[0],
        owner=plan.owners[0],
        num_global_examples=batch.num_examples,
        span=PlanSpan(read_start_ns=read_start_ns, plan_start_ns=start_ns, plan_end_ns=time.monotonic_ns()),
    )
