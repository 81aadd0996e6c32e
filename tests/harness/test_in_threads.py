from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tests.harness.in_threads import in_threads


def test_every_item_has_a_result_and_every_thread_a_worker() -> None:
    entered, ended = list[int](), list[int]()

    @contextmanager
    def worker() -> Iterator[Callable[[int], int]]:
        entered.append(1)
        try:
            yield lambda item: item * item
        finally:  # the end of the items is an exception for the workers
            ended.append(1)

    assert sorted(in_threads(range(20), worker, num_threads=3, name="square")) == [n * n for n in range(20)]
    assert len(entered) == len(ended) == 3


def test_an_error_of_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_threads([1, 0, 2], lambda: nullcontext(lambda item: 1 / item), num_threads=1, name="inverse"))
