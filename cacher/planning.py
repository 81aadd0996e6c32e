"""`PlannedData`: a data source with the oracle on top. In one process; `service` puts it behind a socket.

    loader ──Batch──> planner's window (lookahead) ──CachePlan──> Step

Bad data ends the stream only after all steps before it, whatever the lookahead; a batch that cannot fit the cache ends
it at once, since then no part of the job can be done as configured.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from bagpipe.batch import Batch
from bagpipe.client.step import Phase, PlanSpan, Step
from bagpipe.config import DataConfig
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import Planner, make_planner
from data.formats import open_source
from data.loader import LookaheadLoader, open_loader

__all__ = ["PlannedData"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    """A batch in the window: when its reading began, and how many rows had been skipped when it was complete."""

    batch: Batch
    read_start_ns: int
    skipped_rows: int


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
        self._skipped_rows: dict[Phase, int] = {}
        self.schema = self._source.schema

    def steps(self, phase: Phase, spec: OracleSpec, *, max_steps: int = 0) -> Generator[Step, None, None]:
        """Steps of a phase in batch order, see `StepSource`. Closing them stops the loader."""
        with closing(self._steps(phase, spec)) as steps:
            yield from itertools.islice(steps, max_steps or None)

    def skipped_rows(self) -> int:
        """Malformed rows skipped so far: those before the last step handed out, of each phase."""
        return sum(self._skipped_rows.values())

    def _steps(self, phase: Phase, spec: OracleSpec) -> Generator[Step, None, None]:
        planner = make_planner(spec)
        window: deque[_Waiting] = deque()
        self._skipped_rows[phase] = 0
        with self._loader(phase) as loader:
            error = yield from self._fill(planner, window, loader, phase)
            while window:
                yield self._plan(planner, window, phase)
            # Also those after the last good row.
            self._skipped_rows[phase] = loader.skipped_rows()
            if error is not None:
                raise error

    def _fill(
        self, planner: Planner | DirectPlanner, window: deque[_Waiting], loader: LookaheadLoader, phase: Phase
    ) -> Generator[Step, None, InputError | None]:
        """Steps while the window is full. Returns when the data ends: None, or with what is wrong with it."""
        while True:
            read_start_ns = time.monotonic_ns()
            try:
                batch = next(loader, None)
                if batch is None:
                    return None
                planner.push(batch)
            except CapacityError:
                raise
            except InputError as error:
                return error
            window.append(_Waiting(batch=batch, read_start_ns=read_start_ns, skipped_rows=loader.skipped_rows()))
            if planner.is_ready:
                yield self._plan(planner, window, phase)

    def _plan(self, planner: Planner | DirectPlanner, window: deque[_Waiting], phase: Phase) -> Step:
        start_ns = time.monotonic_ns()
        plan = planner.plan()
        waiting = window.popleft()
        self._skipped_rows[phase] = waiting.skipped_rows
        return Step(
            batch=waiting.batch,
            consumer=plan.consumers[0],
            owner=plan.owners[0],
            num_global_examples=waiting.batch.num_examples,
            span=PlanSpan(read_start_ns=waiting.read_start_ns, plan_start_ns=start_ns, plan_end_ns=time.monotonic_ns()),
        )

    def _loader(self, phase: Phase) -> LookaheadLoader:
        return open_loader(self._config, seed=self._seed, phase=phase, source=self._source)
