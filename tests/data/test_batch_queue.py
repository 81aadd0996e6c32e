from __future__ import annotations

import threading

import pytest

from data.batch_queue import BatchQueue


def test_items_come_out_in_order_and_never_more_than_fit() -> None:
    buffer: BatchQueue[int] = BatchQueue(3)

    def produce() -> None:
        for number in range(200):
            assert buffer.put(number)
        buffer.finish()

    thread = threading.Thread(target=produce)
    thread.start()
    got = []
    while (item := buffer.get()) is not None:
        got.append(item)
        assert len(buffer) <= 3
    thread.join()
    assert got == list(range(200))
    assert 1 <= buffer.peak <= 3
    assert buffer.get() is None


def test_an_error_comes_after_the_items_and_stays() -> None:
    buffer: BatchQueue[int] = BatchQueue(2)
    buffer.put(1)
    buffer.fail(ValueError("bad"))
    assert buffer.get() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            buffer.get()


@pytest.mark.parametrize("full", [True, False])
def test_close_wakes_waiting_threads_and_is_not_the_end(full: bool) -> None:
    buffer: BatchQueue[int] = BatchQueue(1)
    if full:
        buffer.put(0)

    def get() -> object:
        with pytest.raises(RuntimeError, match="closed before its last item"):
            return buffer.get()
        return "an error"

    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(buffer.put(1) if full else get()))
    thread.start()
    buffer.close()
    thread.join()
    assert answers == ([False] if full else ["an error"])
    assert buffer.put(2) is False
    assert get() == "an error"


def test_a_wait_ends_with_an_item_the_end_or_a_wake() -> None:
    buffer: BatchQueue[int] = BatchQueue(2)
    assert not buffer.wait(0)
    buffer.wake()
    assert not buffer.wait(60)  # and the next wait is not woken
    assert not buffer.wait(0)
    buffer.put(1)
    assert buffer.wait(60)
    assert buffer.get() == 1
    buffer.finish()
    assert buffer.wait(60)
