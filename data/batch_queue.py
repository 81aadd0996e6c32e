"""`BatchQueue`: the bounded queue between the thread that makes batches and whoever uses them.

put ──blocks while full──> [item, item, …] ──> get ──blocks while empty──>
finish / fail: get hands out what is there, then says so      close: wakes and stops both sides, and is no end
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["BatchQueue"]

Item = TypeVar("Item")


class BatchQueue(Generic[Item]):
    """A queue of at most `capacity` items with one producer and one consumer.

    Counters (read them without the lock; each has one writer): `peak` most items held; `producer_waits` and
    `consumer_waits` how often a side found it full or empty.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.peak = 0
        self.producer_waits = 0
        self.consumer_waits = 0
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._finished = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> bool:
        """Add an item, waiting for room; False if the buffer was closed instead."""
        with self._changed:
            if len(self._items) >= self.capacity and not self._closed:
                self.producer_waits += 1
                self._changed.wait_for(lambda: len(self._items) < self.capacity or self._closed)
            if self._closed:
                return False
            self._items.append(item)
            self.peak = max(self.peak, len(self._items))
            self._changed.notify_all()
            return True

    def get(self) -> Item | None:
        """The next item, waiting for it; None when there are no more. Raises what `fail` was given, every time.

        Raises:
            RuntimeError: the buffer was closed: there may have been more.
        """
        with self._changed:
            if not (self._items or self._finished or self._closed):
                self.consumer_waits += 1
                self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._closed:
                raise RuntimeError("closed before its end")
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return None

    def finish(self) -> None:
        """No more items will be put."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more items will be put, because of `error`."""
        with self._changed:
            self._error = error
            self._finished = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop what is held and let nobody wait."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
