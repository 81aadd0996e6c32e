"""`Checkpointing`: the part of a loop that records checkpoints while it trains; the work is `Recorder`'s.

before the first forward of b in a chunk    copy the chunk              compute lanes
before rows of b change                     begin the snapshot of rows  compute, push
around write-backs                          close logs, journal rows    net-out
between two batches, at the end             a whole checkpoint          no lane acts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagpipe.checkpoint.recorder import Recorder
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.interface import WriteRequest
from bagpipe.training.dense import DensePart
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.part import Hook, LoopPart, LoopRun
from bagpipe.training.totals import Totals

__all__ = ["Checkpointing"]


class Checkpointing(LoopPart):
    """Records the checkpoints of one rank.

    Args:
        recorder: entered by the caller.
        dense: the dense part.
        guard: is asked about the batches before a checkpoint.
        totals: counts batches.
    """

    def __init__(self, recorder: Recorder, *, dense: DensePart, guard: NonfiniteGuard, totals: Totals) -> None:
        self._recorder = recorder
        self._dense = dense
        self._guard = guard
        self._totals = totals

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.FORWARD, when="before", call=self._before_forward)
        yield Hook(at=Point.UPDATE, when="before", call=self._before_update)

    def start(self, run: LoopRun) -> None:
        self._recorder.start(run, self._guard.check_before)

    def before_write(self, epoch: int) -> None:
        self._recorder.before_write(epoch)

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, b: int) -> None:
        self._recorder.after_write(requests, epoch, b)

    def before_flush(self) -> None:
        self._recorder.drain()

    def checkpoint(self) -> None:
        """Make a checkpoint now, between two batches. See `Recorder.checkpoint`."""
        self._recorder.checkpoint(self._totals.num_batches)

    def end(self) -> None:
        """Make the last checkpoint."""
        self._recorder.finish(self._totals.num_batches)

    def _before_forward(self, key: OpKey, index: int) -> None:
        first = self._dense.starts(key, index)
        if first is not None:
            chunk, counter, b = first
            self._recorder.before_forward(b, chunk, counter)

    def _before_update(self, key: OpKey, b: int) -> None:
        # The push lane copies no rows: peers wait for it.
        self._recorder.before_update(b, drains=key[1] != "X_UPDATE_LATE")
