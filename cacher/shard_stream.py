"""`IndexStream`: one phase that this daemon indexes for a cacher, as one of its shards. A thread reads and indexes.

loader, of the shard's columns ──Batch──> BatchIndexer ──encode_index──> memory shared with the cacher, or bytes
                                                        └─ waits while it is ahead of the credits
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.index_codec import ShardPart, encode_index
from bagpipe.client.shared_ring import MIN_SHARED_BYTES, RingWriter
from bagpipe.oracle.batch_indexer import BatchIndexer
from cacher.counters import Counters
from cacher.process import resident_bytes
from data.loader import LookaheadLoader

__all__ = ["IndexStream", "ShardTask"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask:
    """What to index.

    Attributes:
        loader: begins at or before `next_batch`.
        indexer: of the shard's tables.
        next_batch: the first one to send.
        credits: batches to send beyond those acknowledged.
        with_lengths, with_examples: see `bagpipe.client.index_codec`.
    """

    loader: LookaheadLoader
    indexer: BatchIndexer
    next_batch: int
    credits: int
    with_lengths: bool
    with_examples: bool


class IndexStream:
    """A thread that indexes; the event loop's thread has the other methods.

    Args:
        task: what to index.
        ring: for large parts, open until `close` at least; None: there is none.
        counters: totals for the metrics.

    Attributes:
        has_message: set, on the loop, when `take` may have one.
        error: that ended the thread; None: none did.
    """

    def __init__(self, task: ShardTask, ring: RingWriter | None, counters: Counters) -> None:
        self.has_message = asyncio.Event()
        self.error: Exception | None = None
        self._task = task
        self._ring = ring
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._watermark = task.next_batch
        self._sent = task.next_batch
        self._is_closed = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="cacher-shard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def acknowledge(self, watermark: int) -> bool:
        """The cacher has taken all batches below the watermark. False if fewer were sent."""
        with self._changed:
            if watermark > self._sent:
                return False
            self._watermark = max(self._watermark, watermark)
            self._changed.notify_all()
            return True

    def take(self) -> tuple[bytes | None, bool]:
        """The next message to send, if there is one, and whether the thread has ended after it."""
        self.has_message.clear()
        with self._changed:
            return (self._messages.popleft(), False) if self._messages else (None, self._has_ended)

    def close(self) -> None:
        """End the thread. Does not wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread. Returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._index_all()
        except Exception as error:  # the cacher must get any error instead of waiting
            self.error = error
        with self._changed:
            self._has_ended = True
        self._tell()

    def _index_all(self) -> None:
        task, number = self._task, self._task.next_batch
        with task.loader as loader:
            for batch in loader:
                if self._is_closed:
                    return
                if batch.index < task.next_batch:
                    continue
                start_s = time.thread_time()
                indexed = task.indexer.index(batch)
                lengths = np.ascontiguousarray(batch.lengths) if task.with_lengths else None
                frame = encode_index(ShardPart(indexed=indexed, lengths=lengths), with_examples=task.with_examples)
                num_bytes = sum(map(len, frame))
                busy_s, waited_s = time.thread_time() - start_s, self._wait_for_credit(batch.index)
                number = batch.index + 1
                self._post(self._part(batch.index, frame, busy_s, waited_s), number)
                self._counters.add(batches_indexed=1, index_s=busy_s, bytes_indexed=num_bytes)
        self._post(pb.IndexReply(end=pb.IndexEnd(next_batch=number)), number)

    def _wait_for_credit(self, index: int) -> float:
        """Wait until a batch may be sent. Returns the seconds waited."""
        start_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or index < self._watermark + self._task.credits)
        return time.perf_counter() - start_s

    def _part(self, index: int, frame: Sequence[bytes | memoryview], busy_s: float, waited_s: float) -> pb.IndexReply:
        part = pb.IndexPart(
            index=index, busy_ns=round(busy_s * 1e9), waited_ns=round(waited_s * 1e9), rss_bytes=resident_bytes()
        )
        start, num_bytes = None, sum(map(len, frame))
        if self._ring is not None and num_bytes >= MIN_SHARED_BYTES:
            with self._changed:  # the ring is closed only after `close`
                start = None if self._is_closed else self._ring.put(*frame)
        if start is None:
            part.payload = b"".join(frame)
        else:
            part.shared.CopyFrom(pb.Shared(start=start, num_bytes=num_bytes))
        return pb.IndexReply(part=part)

    def _post(self, message: pb.IndexReply, sent: int) -> None:
        data = message.SerializeToString()
        with self._changed:
            self._messages.append(data)
            self._sent = sent
        self._tell()

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the daemon ends
            self._loop.call_soon_threadsafe(self.has_message.set)
