"""`Ahead`: an iterator that a thread of its own runs, a few items ahead of the thread that iterates.

    items ──next──> thread ──at most `depth` items──> iterating thread

Where `cacher.shards` spreads the planning of a phase, three threads of the cacher share what is left: one joins the
shards' results, one decides, one writes the records of the ranks. numpy gives up the interpreter lock in its long
operations.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, Self, TypeVar

__all__ = ["Ahead"]

_Item = TypeVar("_Item")


class Ahead(Generic[_Item]):
    """One thread iterates; `stop` can be called from any.

    Args:
        items: what the thread runs. Its error is raised after the items before it.
        depth: items that wait, at most.
        name: of the thread.
    """

    def __init__(self, items: Iterator[_Item], *, depth: int, name: str) -> None:
        self._items = items
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: deque[_Item] = deque()
        self._error: Exception | None = None
        self._has_ended = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Yield nothing more, and end the thread after the item that it is at. Does not wait for it."""
        with self._changed:
            self._is_stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread after `stop`, or after the last item. Returns whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._has_ended or self._is_stopped)
            if self._is_stopped:
                raise StopIteration
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                item = next(self._items)
                if not self._put(item):
                    break
        except StopIteration:
            pass
        except Exception as error:  # the iterating thread must get any error instead of waiting
            self._error = error
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _put(self, item: _Item) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._is_stopped)
            if not self._is_stopped:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._is_stopped
