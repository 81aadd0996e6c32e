"""`PlanStream`: one planner of a job that brings its own batches. A thread plans, the event loop moves frames.

    event loop: reader ──put──> frames, bounded ──receive──> planner thread: serve_runs
                sender <──take── pieces, bounded <──send────────────┘

Planning must not hold up the event loop, which serves other jobs. A thread is enough, as for a `Run`: numpy gives up
the interpreter lock in its long operations, and no training process shares it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import MAX_PLAN_BYTES
from bagpipe.errors import InputError
from bagpipe.lookahead.frames import FrameKind
from bagpipe.lookahead.link import Frame, LinkClosed
from bagpipe.lookahead.pieces import pieces_of
from bagpipe.lookahead.protocol import Intake, serve_runs
from cacher.counters import Counters

__all__ = ["BUFFER_BYTES", "PlanStream"]

#: Bytes that wait in each direction, and at most one frame or piece more.
BUFFER_BYTES = 8 << 20


class PlanStream:
    """A `FrameLink` of the planner thread; the event loop's thread has the other end.

    Args:
        name: of the thread.
        intake: see `serve_runs`.
        counters: totals for the metrics.

    Attributes:
        has_room, has_message: set, on the loop, when `put` or `take` may do more.
        error: that ended the planner thread; None: none did.
    """

    def __init__(self, name: str, intake: Callable[[bytearray], Intake], counters: Counters) -> None:
        self.has_room = asyncio.Event()
        self.has_message = asyncio.Event()
        self.error: Exception | None = None
        self._intake = intake
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._incoming: deque[Frame] = deque()
        self._outgoing: deque[bytes] = deque()
        self._num_in = self._num_out = 0  # bytes waiting
        self._is_closed = self._has_ended = False
        self._thread = threading.Thread(target=self._plan, name=name, daemon=True)

    # ---- on the event loop's thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the planner thread."""
        self._thread.start()

    def put(self, frame: Frame) -> bool:
        """Hand a frame to the planner. False: there is no room, or the planner has ended."""
        self.has_room.clear()
        with self._changed:
            if self._has_ended or self._num_in >= BUFFER_BYTES:
                return False
            self._incoming.append(frame)
            self._num_in += len(frame.data) + 1
            self._changed.notify_all()
            return True

    def take(self) -> tuple[bytes | None, bool]:
        """The next message to send, if there is one, and whether the planner has ended after it."""
        self.has_message.clear()
        with self._changed:
            if not self._outgoing:
                return None, self._has_ended
            message = self._outgoing.popleft()
            self._num_out -= len(message)
            self._changed.notify_all()
            return message, False

    def close(self) -> None:
        """End the planner thread. Does not wait for it, and drops what waits."""
        with self._changed:
            self._is_closed = True
            self._incoming.clear()
            self._outgoing.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the planner thread. Returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- on the planner thread -----------------------------------------------------------------------------------

    def send(self, kind: int, run: int, parts: Sequence[Any] = ()) -> None:
        """See `FrameLink`.

        Raises:
            InputError: the plan of a batch is too large for a trainer.
            LinkClosed: the stream has ended.
        """
        num_bytes = sum(map(len, parts))
        if num_bytes > MAX_PLAN_BYTES:
            raise InputError(
                f"a batch has a plan of {num_bytes >> 20} MiB, a trainer takes at most {MAX_PLAN_BYTES >> 20} MiB: "
                "bring smaller batches"
            )
        encode_s = 0.0
        pieces = pieces_of(kind, run, parts)
        while True:
            start_s = time.perf_counter()
            piece = next(pieces, None)
            message = b"" if piece is None else pb.PlanReply(piece=piece).SerializeToString()
            encode_s += time.perf_counter() - start_s
            if not message:
                break
            self._post(message)
        is_plan = kind == FrameKind.PLAN
        self._counters.add(encode_s=encode_s, batches_sent=int(is_plan), bytes_sent=num_bytes if is_plan else 0)

    def receive(self) -> Frame:
        """See `FrameLink`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._incoming)
            if self._is_closed:
                raise LinkClosed
            frame = self._incoming.popleft()
            self._num_in -= len(frame.data) + 1
        self._tell(self.has_room)
        return frame

    def _post(self, message: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._num_out < BUFFER_BYTES)
            if self._is_closed:
                raise LinkClosed
            self._outgoing.append(message)
            self._num_out += len(message)
        self._tell(self.has_message)

    def _plan(self) -> None:
        try:
            serve_runs(self, self._intake)
        except LinkClosed:
            pass
        except Exception as error:  # the trainer must get any error instead of waiting
            self.error = error
        with self._changed:
            self._has_ended = True
        self._tell(self.has_room)
        self._tell(self.has_message)

    def _tell(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: the daemon ends
            self._loop.call_soon_threadsafe(event.set)
