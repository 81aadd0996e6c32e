"""`in_threads`: items worked on by several threads, with their results in the order of their ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["in_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    items: Sequence[Item],
    worker: Callable[[], AbstractContextManager[Callable[[Item], Result]]],
    *,
    num_threads: int,
    name: str,
) -> Iterator[Result]:
    """The results of all items. The first error of a thread is raised here.

    Args:
        items: taken in their order.
        worker: entered once by each thread; gives what it calls with its items.
        num_threads: threads.
        name: of the threads, which get numbers.
    """
    left, found = SimpleQueue[Item](), SimpleQueue[Result | BaseException]()
    for item in items:
        left.put(item)

    def work() -> None:
        try:
            with worker() as call:
                while True:
                    found.put(call(left.get_nowait()))
        except Empty:
            return
        except BaseException as error:
            found.put(error)

    threads = [threading.Thread(target=work, name=f"{name}-{n}", daemon=True) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for _ in items:
        result = found.get()
        if isinstance(result, BaseException):
            raise result
        yield result
    for thread in threads:
        thread.join()
