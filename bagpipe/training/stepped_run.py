"""`SteppedRun`: a run whose batches the caller computes, one at a time.

start ──> lanes read, fetch, insert, write …      until their bounds
step  ──> compute lane, one batch, in the calling thread: F, B, UPDATE, OPT
rest  ──> no lane acts until the next step        flush: and the store has all updated rows
end   ──> lanes have ended, dirty rows are written, the last checkpoint is made
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bagpipe.errors import JobError
from bagpipe.pipeline.runner import Runner
from bagpipe.training.part import InFlightBatch, LoopRun
from bagpipe.training.progress import RunResult
from bagpipe.training.rows import EvaluationRows

__all__ = ["SteppedRun"]


class SteppedRun:
    """One run. `Engine.train_in_steps` makes it. One thread calls the methods.

    Args:
        run: the run as its parts see it.
        runner: walks its lanes.
        rows: reads rows, and writes them back in training.
        end: ends the parts after the lanes, and gives the result.
    """

    def __init__(self, run: LoopRun, runner: Runner, rows: EvaluationRows, end: Callable[[], RunResult]) -> None:
        self._run = run
        self._runner = runner
        self._rows = rows
        self._end = end
        self._next_batch = run.first_batch
        self._has_ended = False

    @property
    def next_batch(self) -> int:
        """Number of the batch that the next `step` computes."""
        return self._next_batch

    def whole(self) -> RunResult:
        """Train all batches, every lane in a thread of its own."""
        self._runner.run()
        return self._end()

    def start(self) -> None:
        """Start the lanes but that of the compute."""
        self._runner.start()

    def step(self) -> InFlightBatch | None:
        """Compute the next batch. None: there is none; `end` follows.

        Raises:
            The first error of any lane. That of the model, its loss or its optimizer is raised as it is.
        """
        b = self._runner.step()
        if b is None:
            return None
        self._next_batch = b + 1
        return self._run.in_flight[b]

    def rest(self) -> None:
        """Wait until no lane acts before the next `step`. Raises the first error of any lane."""
        self._runner.rest()

    def flush(self) -> None:
        """Rest, and write all updated rows; they stay in the cache.

        Raises:
            StoreError: the store failed.
        """
        self.rest()
        self._rows.flush()

    def rescue(self) -> None:
        """Write all updated rows after an error of the model, its loss or its optimizer, when all lanes have ended."""
        self._rows.rescue()

    def carried(self) -> dict[str, Any]:
        """Counters with which a following run goes on; between two steps or at the end."""
        return dict(self._run.counters())

    def end(self) -> RunResult:
        """End the run after its last batch; see `Engine.train`."""
        self._has_ended = True
        self._runner.end()
        return self._end()

    def give_up(self) -> None:
        """End the lanes, unless `end` was called. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._runner.abort(JobError("the run was given up"))
            with suppress(BaseException):
                self._runner.end()
