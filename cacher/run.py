"""`Run`: one phase of one job. A thread plans and serialises into one bounded buffer per rank.

    planner thread: PlannedPhase ──RankBatches──> buffer of rank 0 │ … │ rank N-1 ──take(index)──> rank's stream
                    waits while any buffer is full                   └── acknowledged batches leave

A buffer holds a rank's batches from its watermark on, at most as many as its credits. Unacknowledged batches can be
sent again after a lost connection. A rank that is slow, late or lost blocks the planner instead of filling memory.
Small batches leave together, while the rank has others (`bagpipe.client.agreement.batches_per_message`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import batches_per_message
from bagpipe.client.codec import values_are_derivable
from bagpipe.client.message import encode_message
from bagpipe.errors import CapacityError, InputError, JobError
from cacher.counters import Counters
from cacher.planned_phase import PlannedPhase

__all__ = ["Run", "RunStatistics", "Taken"]

_LOG = logging.getLogger("cacher")

#: Names of errors on the wire. The client raises the class of that name.
_ERROR_NAMES: Mapping[type[Exception], str] = {CapacityError: "CapacityError", InputError: "InputError"}

#: Batches are sent together up to so many bytes.
_MAX_JOINED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A message for a rank.

    Attributes:
        message: serialised.
        num_batches: in the message.
        is_last: it is the run's last message, End or Error.
    """

    message: bytes
    num_batches: int = 0
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """The state of a run.

    Attributes:
        batches_planned: so far.
        batches_buffered: serialised batches held, by rank.
        bytes_buffered: their bytes, of all ranks.
        credits_free: batches that each rank can still receive.
    """

    batches_planned: int
    batches_buffered: tuple[int, ...]
    bytes_buffered: int
    credits_free: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """One rank's batches ``[first, first + len(messages))``.

    Attributes:
        watermark: batches below are acknowledged.
        credits: batches from the watermark on that can be planned for the rank.
        first: index of the first batch held: the watermark, or the first one that the rank requested.
        left: the rank has left this run.
        awaited: index of the batch that the rank's stream waits for; None: for none.
    """

    watermark: int
    credits: int
    first: int
    messages: deque[bytes] = field(default_factory=deque)
    left: bool = False
    awaited: int | None = None

    def is_due(self, index: int) -> bool:
        """Whether to send the batches from an index on now: they are several, or the rank has few."""
        together = batches_per_message(self.credits)
        num_batches = self.first + len(self.messages) - index
        return num_batches >= together or (num_batches > 0 and index - self.watermark <= self.credits - together)

    def joined(self, index: int) -> Taken:
        """One message of the batches from an index on, at least one."""
        messages: list[bytes] = []
        num_bytes = 0
        for message in islice(self.messages, index - self.first, None):
            num_bytes += len(message)
            if messages and num_bytes > _MAX_JOINED_BYTES:
                break
            messages.append(message)
        return Taken(message=messages[0] if len(messages) == 1 else b"".join(messages), num_batches=len(messages))

    def has_room(self, index: int) -> bool:
        return self.left or index < self.watermark + self.credits

    def forget(self, below: int) -> None:
        """Drop the batches below an index."""
        while self.messages and self.first < below:
            self.messages.popleft()
            self.first += 1
        self.first = max(self.first, below)


class Run:
    """Has one planner thread. Any thread can call the methods.

    Args:
        planned: opens the phase; called in the planner thread.
        number: the run's number on the wire.
        world_size: number of ranks.
        first_batch: index of the first batch.
        credits: of ranks that have not entered yet.
        wake: called in the planner thread with a rank whose next item can be available.
        counters: totals for the metrics.
    """

    def __init__(
        self,
        planned: Callable[[], PlannedPhase],
        *,
        number: int,
        world_size: int,
        first_batch: int,
        credits: int,
        wake: Callable[[int], None],
        counters: Counters,
    ) -> None:
        self._planned = planned
        self._number = number
        self._wake = wake
        self._counters = counters
        self._changed = threading.Condition()
        self._buffers = [_Buffer(watermark=first_batch, credits=credits, first=first_batch) for _ in range(world_size)]
        self._next_index = first_batch
        self._batches_planned = 0
        self._last: bytes | None = None
        self._has_failed = False
        self._stopped = False
        self._batches: PlannedPhase | None = None  # while they are planned
        self._thread = threading.Thread(target=self._plan, name=f"cacher-planner-{number}", daemon=True)

    def start(self) -> None:
        """Start the planner thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop planning. Does not wait for the thread."""
        with self._changed:
            self._stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the planner thread. Returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def enter(self, rank: int, *, credits: int, next_batch: int, watermark: int) -> bool:
        """A rank requests the batches from `next_batch` on. False if it has acknowledged them already."""
        with self._changed:
            buffer = self._buffers[rank]
            if next_batch < buffer.first or buffer.left:
                return False
            buffer.credits = credits
            buffer.watermark = max(buffer.watermark, watermark)
            buffer.forget(next_batch)
            self._changed.notify_all()
            return True

    def acknowledge(self, rank: int, watermark: int) -> bool:
        """A rank has taken all batches below the watermark. False if fewer were planned."""
        with self._changed:
            buffer = self._buffers[rank]
            if watermark > max(self._next_index, buffer.first):
                return False
            buffer.watermark = max(buffer.watermark, watermark)
            buffer.forget(buffer.watermark)
            self._changed.notify_all()
            return True

    def leave(self, rank: int) -> bool:
        """A rank leaves the run. True if it was the last one, which stops planning."""
        with self._changed:
            buffer = self._buffers[rank]
            buffer.left = True
            buffer.messages.clear()
            is_last = all(buffer.left for buffer in self._buffers)
            if is_last:
                self._stop()
            self._changed.notify_all()
            return is_last

    def take(self, rank: int, index: int) -> Taken | None:
        """A message with a rank's batches from an index on; None while there is none, or more will come first.

        The message after the last batch is End or Error. A run that was stopped has none. A batch below the watermark
        has no message any more. After None, the rank is woken when there is a message.
        """
        with self._changed:
            buffer = self._buffers[rank]
            buffer.awaited = None
            if 0 <= index - buffer.first < len(buffer.messages) and (self._last is not None or buffer.is_due(index)):
                return buffer.joined(index)
            if self._last is not None and index >= self._next_index:
                return Taken(message=self._last, is_last=True)
            buffer.awaited = index
            return None

    @property
    def has_failed(self) -> bool:
        """Whether the last message is an Error."""
        return self._has_failed

    def statistics(self) -> RunStatistics:
        with self._changed:
            return RunStatistics(
                batches_planned=self._batches_planned,
                batches_buffered=tuple(len(buffer.messages) for buffer in self._buffers),
                bytes_buffered=sum(len(message) for buffer in self._buffers for message in buffer.messages),
                credits_free=tuple(
                    0 if buffer.left else max(0, buffer.watermark + buffer.credits - self._next_index)
                    for buffer in self._buffers
                ),
            )

    def _stop(self) -> None:
        self._stopped = True
        if self._batches is not None:
            self._batches.stop()  # it can be reading, far from the next batch
        self._changed.notify_all()

    def _plan(self) -> None:
        try:
            self._finish(self._plan_all())
        except Exception as error:  # the trainers must get any error instead of waiting
            name = _ERROR_NAMES.get(type(error), "JobError")
            is_ours = not isinstance(error, (InputError, JobError))
            text = f"the cacher failed: {type(error).__name__}: {error}" if is_ours else str(error)
            self._finish(pb.CacherMessage(error=pb.Error(kind=name, message=text)))
            if name == "JobError":
                _LOG.exception("planner failed", extra={"run": self._number})

    def _plan_all(self) -> pb.CacherMessage:
        """Plan until the end of the data or until stopped. Returns the last message."""
        with closing(self._planned()) as batches:
            with self._changed:
                self._batches = batches
                if self._stopped:
                    batches.stop()
            omit_values = values_are_derivable(batches.spec, batches.num_features)
            for batch in batches:
                # A rank that left cannot enter again, so its part is not needed.
                index, ranks = batch.batch.index, self._ranks_in()
                start_s = time.perf_counter()
                messages = {
                    rank: encode_message(
                        self._number, index, batch.for_rank(rank, without_ids=omit_values), omit_values=omit_values
                    )
                    for rank in ranks
                }
                encode_s = time.perf_counter() - start_s
                plan_s = (batch.span.plan_end_ns - batch.span.plan_start_ns) / 1e9
                self._counters.add(batches_planned=1, plan_s=plan_s, encode_s=encode_s)
                if not self._hand_out(index, messages):
                    break
            if batches.end != self._next_index and not self._stopped:
                raise JobError(f"the plan ended at batch {self._next_index}, before the data")
            end = pb.End(run=self._number, skipped_rows=batches.skipped_rows, next_batch=self._next_index)
            return pb.CacherMessage(end=end)

    def _ranks_in(self) -> list[int]:
        with self._changed:
            return [rank for rank, buffer in enumerate(self._buffers) if not buffer.left]

    def _hand_out(self, index: int, messages: Mapping[int, bytes]) -> bool:
        """Wait for room in every buffer, then append each rank's message. False once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or all(buffer.has_room(index) for buffer in self._buffers))
            if self._stopped:
                return False
            for rank, message in messages.items():
                buffer = self._buffers[rank]
                # A rank that reconnects to a restarted cacher has the first batches already.
                if not buffer.left and index >= buffer.first:
                    buffer.messages.append(message)
            self._next_index = index + 1
            self._batches_planned += 1
            woken = [rank for rank in messages if self._is_awaited(rank)]
        for rank in woken:
            self._wake(rank)
        return True

    def _is_awaited(self, rank: int) -> bool:
        """Whether a rank's stream waits for what is due now; only once per wait."""
        buffer = self._buffers[rank]
        if buffer.awaited is None or not buffer.is_due(buffer.awaited):
            return False
        buffer.awaited = None
        return True

    def _finish(self, message: pb.CacherMessage) -> None:
        with self._changed:
            self._batches = None
            if self._stopped:
                return  # a rank would take the message for the end of the data
            self._last = message.SerializeToString()
            self._has_failed = message.WhichOneof("kind") == "error"
            ranks = range(len(self._buffers))
        for rank in ranks:
            self._wake(rank)
