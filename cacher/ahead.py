"""`Ahead`: an iterator that a thread of its own runs, a few items ahead of the thread that iterates.

    items ──next──> thread ──at most `depth` items──> iterating thread

Where `cacher.shards` spreads the planning of a phase, three threads of the cacher share what is left: one joins the
shards' results, one decides, one writes the records of the ranks. numpy gives up the interpreter lock in its long
operations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, Self, TypeVar

from data.batch_queue import BatchQueue

__all__ = ["Ahead"]

_Item = TypeVar("_Item")


class Ahead(Generic[_Item]):
    """One thread iterates; `stop` can be called from any.

    Args:
        items: what the thread runs; none is None. Its error is raised after the items before it.
        depth: items that wait, at most.
        name: of the thread.
    """

    def __init__(self, items: Iterator[_Item], *, depth: int, name: str) -> None:
        self._items = items
        self._queue: BatchQueue[_Item] = BatchQueue(depth)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Yield nothing more, and end the thread after the item that it is at. Does not wait for it."""
        self._queue.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread after `stop`, or after the last item. Returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Item:
        try:
            item = self._queue.get()
        except RuntimeError:
            if not self._queue.closed:
                raise
            item = None
        if item is None:
            raise StopIteration
        return item

    def _run(self) -> None:
        try:
            while not self._queue.closed:
                self._queue.put(next(self._items))
        except StopIteration:
            self._queue.finish()
        except Exception as error:  # the iterating thread must get any error instead of waiting
            self._queue.fail(error)
