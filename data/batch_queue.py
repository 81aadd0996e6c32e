"""`BatchQueue`: the bounded queue between the thread that makes batches and their consumer.

put ──blocks while full──> [item, item, …] ──> get ──blocks while empty──>
finish / fail: get returns the remaining items, then None or the error      close: wakes both sides; get raises
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["BatchQueue"]

Item = TypeVar("Item")


class BatchQueue(Generic[Item]):
    """A queue of at most `capacity` items with one producer and one consumer.

    Counters (each has one writer; read them without the lock): `peak`, the most items held; `producer_waits` and
    `consumer_waits`, how often a side found the queue full or empty.
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
        self._woken = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> bool:
        """Add an item; waits while the queue is full. Returns False if the queue was closed."""
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
        """Return the next item; waits while the queue is empty. None after the last item.

        Raises:
            RuntimeError: the queue was closed, possibly before its last item.
            BaseException: the error given to `fail`, at every call.
        """
        with self._changed:
            if not (self._items or self._finished or self._closed):
                self.consumer_waits += 1
                self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._closed:
                raise RuntimeError("the batch queue was closed before its last item")
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            return None

    def wait(self, timeout_s: float) -> bool:
        """Wait until `get` does not wait, at most so long, or until `wake`. False: it would wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._is_decided(), timeout_s)
            self._woken = False
            return self._is_decided()

    def wake(self) -> None:
        """End a `wait`, or the next one. From any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _is_decided(self) -> bool:
        return bool(self._items) or self._finished or self._closed

    def finish(self) -> None:
        """Mark the end: no more items will be put."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Mark the end because of `error`."""
        with self._changed:
            self._error = error
            self._finished = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop all items and wake both sides."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
