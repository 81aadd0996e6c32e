"""`Checkpointing`: the part of a loop that records checkpoints while it trains; the work is `Recorder`'s.

before the first forward of b in a chunk    copy the chunk              compute lanes
after new weights of b - 1 in a chunk       the same, where forwards of b precede its step
after rows of b - 1 changed                 copy them as they were, if a part keeps them
before rows of b change                     begin the snapshot of rows  compute, push
around write-backs                          close logs, journal rows    net-out
between two batches, at the end             a whole checkpoint          no lane acts
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from bagpipe.checkpoint.recorder import Recorder
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.interface import DeleteRequest, WriteRequest
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
        rows_delay: updates of rows that the lookup of a batch leaves out; forwards then precede steps of the batch
            before.
        num_updates: lanes that update rows of a batch.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        dense: DensePart,
        guard: NonfiniteGuard,
        totals: Totals,
        rows_delay: int = 0,
        num_updates: int = 1,
    ) -> None:
        self._recorder = recorder
        self._rows_delay = rows_delay
        self._num_updates = num_updates
        self._num_updated: Counter[int] = Counter()  # lanes that are done with a batch, until all are
        self._lock = threading.Lock()
        self._dense = dense
        self._guard = guard
        self._totals = totals

    def hooks(self) -> Iterable[Hook]:
        if self._rows_delay:
            yield Hook(at=Point.WEIGHTS, when="after", call=self._after_step)
            yield Hook(at=Point.UPDATE, when="after", call=self._after_update)
        else:
            yield Hook(at=Point.FORWARD, when="before", call=self._before_forward)
        yield Hook(at=Point.UPDATE, when="before", call=self._before_update)

    def start(self, run: LoopRun) -> None:
        self._num_updated.clear()
        self._recorder.start(run, self._guard.check_before)

    def before_write(self, epoch: int) -> None:
        self._recorder.before_write(epoch)

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, b: int) -> None:
        self._recorder.after_write(requests, epoch, b)

    def after_delete(self, requests: Sequence[DeleteRequest], epoch: int, b: int) -> None:
        self._recorder.after_delete(requests, epoch, b)

    def before_flush(self) -> None:
        self._recorder.drain()

    def checkpoint(self, *, again: bool) -> None:
        """Make a checkpoint now, between two batches. See `Recorder.checkpoint`."""
        self._recorder.checkpoint(self._totals.num_batches, again=again)

    def end(self) -> None:
        """Make the last checkpoint."""
        self._recorder.finish(self._totals.num_batches)

    def _before_forward(self, key: OpKey, index: int) -> None:
        first = self._dense.starts(key, index)
        if first is not None:
            chunk, counter, b = first
            self._recorder.record_chunk(b, chunk, counter)

    def _after_step(self, key: OpKey, b: int) -> None:
        chunk = self._dense.chunk_of(key)
        if chunk is not None:
            for counter in chunk.counters:  # all forwards of batch b are over, in other lanes too
                self._recorder.record_chunk(b + 1, chunk.name, counter)

    def _after_update(self, key: OpKey, b: int) -> None:
        with self._lock:
            self._num_updated[b] += 1
            is_last = self._num_updated[b] == self._num_updates
            if is_last:
                del self._num_updated[b]
        if is_last:
            self._recorder.after_update(b + 1)

    def _before_update(self, key: OpKey, b: int) -> None:
        # The push lane copies no rows: peers wait for it.
        self._recorder.before_update(b, drains=key[1] != "X_UPDATE_LATE")
