"""`Clock`: wall and processor time of a job's training, without its evaluations.

    first step ──training──> evaluation: a mark ──not counted──> training ──…──> end of training: the last mark

Processor time is that of all threads of the process, so it includes the lanes of rows, the cacher's client and the
store in memory, and leaves out the processes that parse data. Work that evaluations prepare meanwhile is counted as
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from bagpipe.training.stepped_run import SteppedRun
from trainer.evaluation import Evaluator

__all__ = ["Clock", "Mark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Time of training before an evaluation.

    Attributes:
        wall_s, processor_s: since the first step.
    """

    wall_s: float
    processor_s: float


def _now() -> Mark:
    return Mark(wall_s=time.perf_counter(), processor_s=time.process_time())


@dataclass(slots=True, kw_only=True)
class Clock:
    """Times of one job.

    Attributes:
        skipped: steps at the start that are not counted in `per_step_s`.
        marks: by number of steps trained, at evaluations.
        steps: at the end of each step of the training.
    """

    skipped: int = 20
    marks: dict[int, Mark] = field(default_factory=dict)
    steps: list[Mark] = field(default_factory=list)
    _start: Mark | None = None
    _excluded: Mark = Mark(wall_s=0.0, processor_s=0.0)
    _evaluating: bool = False

    @property
    def per_step_s(self) -> float:
        """Processor seconds of a step, those at the start left out."""
        first, last = self.steps[self.skipped - 1], self.steps[-1]
        return (last.processor_s - first.processor_s) / (len(self.steps) - self.skipped)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the job that runs here."""
        step, during, final = SteppedRun.step, Evaluator.evaluate, Evaluator.final

        def stepped(run: SteppedRun) -> Any:
            if self._evaluating:
                return step(run)
            self._start = self._start or _now()
            found = step(run)
            if found is not None:
                self.steps.append(self._trained())
            return found

        with (
            patch.object(SteppedRun, "step", stepped),
            patch.object(Evaluator, "evaluate", self._around(during)),
            patch.object(Evaluator, "final", self._around(final)),
        ):
            yield

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(evaluator: Evaluator, step: int) -> Any:
            before = _now()
            self.marks.setdefault(step, self._trained())
            self._evaluating = True
            try:
                return call(evaluator, step)
            finally:
                self._evaluating, after = False, _now()
                self._excluded = Mark(
                    wall_s=self._excluded.wall_s + after.wall_s - before.wall_s,
                    processor_s=self._excluded.processor_s + after.processor_s - before.processor_s,
                )

        return evaluate

    def _trained(self) -> Mark:
        assert self._start is not None, "there was a step"
        now = _now()
        return Mark(
            wall_s=now.wall_s - self._start.wall_s - self._excluded.wall_s,
            processor_s=now.processor_s - self._start.processor_s - self._excluded.processor_s,
        )
