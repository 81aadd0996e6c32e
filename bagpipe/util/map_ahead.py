"""`map_ahead`: a function applied by threads to a bounded number of items ahead; the results come in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

__all__ = ["map_ahead"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_ahead(
    pool: Executor, function: Callable[[_Item], _Result], items: Iterable[_Item], ahead: int
) -> Iterator[_Result]:
    """The results in the order of the items. The first error of the function ends it.

    Args:
        pool: of threads.
        function: safe to call from several threads.
        items: taken by the calling thread.
        ahead: most results that are made or held, at least 1.
    """
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            if len(waiting) == ahead:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
