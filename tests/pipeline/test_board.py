from __future__ import annotations

import threading

import pytest

from bagpipe.errors import JobError
from bagpipe.pipeline.board import Aborted, Board


def board(lanes: int = 2, end: int = 100) -> Board:
    return Board(["0X_FETCH", "0X_INSERT"], [f"lane{n}" for n in range(lanes)], end)


def test_no_wait_for_finished_units() -> None:
    b = board()
    b.advance(0)
    assert b.wait(1, 0, 1, batch=0)


def test_no_wait_for_batches_after_the_end() -> None:
    assert not board(end=3).wait(0, 0, 1, batch=3)


def test_an_abort_reaches_later_waits() -> None:
    b = board()
    assert b.fail(ValueError("one"))
    assert not b.fail(ValueError("two"))
    with pytest.raises(Aborted):
        b.wait(0, 0, 1, batch=0)
    assert str(b.error) == "one"


def test_waiting_for_each_other_is_a_deadlock() -> None:
    b = board()
    seen: list[bool] = []

    def first() -> None:
        with pytest.raises(Aborted):
            b.wait(0, 0, 1, batch=4)
        seen.append(True)

    thread = threading.Thread(target=first)
    thread.start()
    while b.peak_waiting == 0:
        threading.Event().wait(0.001)
    with pytest.raises(Aborted):
        b.wait(1, 1, 2, batch=5)
    thread.join()
    assert seen
    assert isinstance(b.error, JobError)
    assert str(b.error) == (
        "deadlock: lane0 at batch 4 waits for 0X_FETCH (0 done, 1 needed); "
        "lane1 at batch 5 waits for 0X_INSERT (0 done, 2 needed)"
    )


def test_waiting_for_a_lane_that_has_left_is_a_deadlock() -> None:
    b = board()
    b.leave()
    with pytest.raises(Aborted):
        b.wait(1, 0, 1, batch=0)
    assert "lane1 at batch 0 waits for 0X_FETCH" in str(b.error)


def test_no_wake_up_is_lost() -> None:
    """Two lanes in lock step each wait for the other's last unit, so a lost wake-up would hang."""
    b, rounds = board(end=10**9), 20_000
    start = threading.Barrier(2)

    def ping() -> None:
        start.wait()
        for n in range(rounds):
            b.advance(0)
            assert b.wait(0, 1, n + 1, batch=n)
        b.leave()

    def pong() -> None:
        start.wait()
        for n in range(rounds):
            assert b.wait(1, 0, n + 1, batch=n)
            b.advance(1)
        b.leave()

    threads = [threading.Thread(target=ping), threading.Thread(target=pong)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b.error is None
    assert b.done == [rounds, rounds]


def test_the_end_wakes_only_waits_for_later_batches() -> None:
    b = board(lanes=3)
    answers: dict[int, bool] = {}

    def wait(lane: int, batch: int) -> None:
        answers[lane] = b.wait(lane, 0, batch + 1, batch)

    threads = [threading.Thread(target=wait, args=(0, 0)), threading.Thread(target=wait, args=(1, 1))]
    for thread in threads:
        thread.start()
    while b.peak_waiting < 2:
        threading.Event().wait(0.001)
    b.finish(1)
    threads[1].join()
    assert answers == {1: False}
    b.advance(0)
    threads[0].join()
    assert answers == {0: True, 1: False}


def test_a_lane_that_waits_calls_its_check() -> None:
    b = board()
    b.check_while_waiting(0, lambda: b.fail(ValueError("asked")))
    with pytest.raises(Aborted):
        b.wait(0, 0, 1, batch=0)
    assert str(b.error) == "asked"


def test_a_lane_waits_for_any_of_several_needs() -> None:
    b = board()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(b.wait_any(0, {0: 2, 1: 1}, 0)))
    thread.start()
    while b.peak_waiting == 0:
        threading.Event().wait(0.001)
    b.advance(0)  # too few
    b.advance(1)
    thread.join()
    assert found == [True]
    b.advance(0)  # the lane is registered nowhere any more
    assert b.wait_any(0, {0: 2, 1: 9}, 0)
    assert not b.wait_any(0, {0: 9}, 100)


def test_a_deadlock_names_all_that_a_lane_waits_for() -> None:
    b = board(lanes=1)
    with pytest.raises(Aborted):
        b.wait_any(0, {1: 3, 0: 2}, 5)
    assert str(b.error) == (
        "deadlock: lane0 at batch 5 waits for 0X_FETCH (0 done, 2 needed) or 0X_INSERT (0 done, 3 needed)"
    )


@pytest.mark.parametrize("is_released", [False, True])
def test_a_check_ends_its_wait_alone(monkeypatch: pytest.MonkeyPatch, is_released: bool) -> None:
    """Whether or not what the lane waits for is done at the same time: the lane can wait again."""
    monkeypatch.setattr("bagpipe.pipeline.board._CHECK_S", 1e-3)
    b = board()

    def check() -> None:
        if is_released:
            b.advance(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        b.wait(1, 0, 1, 0, check)
    waiter = threading.Thread(target=b.wait, args=(1, 0, 2, 0))
    waiter.start()
    b.advance(0)
    b.advance(0)
    waiter.join()
    assert b.error is None
