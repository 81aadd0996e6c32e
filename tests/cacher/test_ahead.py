"""An iterator that a thread runs ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cacher.ahead import Ahead


def test_the_items_come_in_order_and_end() -> None:
    ahead = Ahead(iter(range(50)), depth=3, name="test")
    ahead.start()
    assert list(ahead) == list(range(50))
    assert list(ahead) == []
    assert ahead.join(20)


def test_an_error_comes_after_the_items_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("three")

    ahead = Ahead(failing(), depth=9, name="test")
    ahead.start()
    assert (next(ahead), next(ahead)) == (1, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            next(ahead)
    assert ahead.join(20)


def test_no_more_wait_than_the_depth() -> None:
    made: list[int] = []
    is_third = threading.Event()

    def counted() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            if number == 2:
                is_third.set()
            yield number

    ahead = Ahead(counted(), depth=2, name="test")
    ahead.start()
    assert is_third.wait(20)
    assert made == [0, 1, 2]  # two wait, and the third has no place
    ahead.stop()
    assert ahead.join(20)
    assert made == [0, 1, 2]
    assert list(ahead) == []


def test_stop_wakes_the_thread_that_iterates() -> None:
    goes_on = threading.Event()

    def waiting() -> Iterator[int]:
        yield 0
        goes_on.wait(20)
        yield 1

    ahead = Ahead(waiting(), depth=2, name="test")
    ahead.start()
    found: list[int] = []
    iterating = threading.Thread(target=lambda: found.extend(ahead))
    iterating.start()
    ahead.stop()
    iterating.join(20)
    assert not iterating.is_alive()
    goes_on.set()
    assert ahead.join(20)
    assert found in ([], [0])
