from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagpipe.errors import InputError, JobError
from bagpipe.util.process_pool import ProcessPool, check_interrupt, usable_cores

pytestmark = pytest.mark.multiproc


def doubled(number: int) -> int:
    return 2 * number


def refused(number: int) -> int:
    raise InputError(f"expected less, got {number}")


def killed(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_results_come_in_order(jobs: int) -> None:
    taken = []

    def work() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    with ProcessPool(jobs) as pool:
        results = pool.map(doubled, work())
        assert next(results) == 0
        assert len(taken) <= 2 * jobs + 1, "the work is taken as it is needed"
        assert [0, *results] == [2 * number for number in range(20)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_error_of_a_process_is_one_line(jobs: int) -> None:
    with ProcessPool(jobs) as pool, pytest.raises(InputError, match=r"^expected less, got 0$") as caught:
        list(pool.map(refused, range(5)))
    assert jobs == 1 or caught.value.__cause__ is None


def test_a_killed_process_is_named() -> None:
    with ProcessPool(2) as pool, pytest.raises(JobError, match="a process ended unexpectedly"):
        list(pool.map(killed, range(5)))


def own_process(_: int) -> int:
    return os.getpid()


def test_processes_can_start_before_there_is_work() -> None:
    with ProcessPool(2) as pool:
        pool.start()
        assert os.getpid() not in set(pool.map(own_process, range(4)))


@pytest.mark.parametrize("jobs", [1, 3])
def test_unordered_results_are_all_there(jobs: int) -> None:
    with ProcessPool(jobs) as pool:
        assert sorted(pool.map_unordered(doubled, range(20))) == [2 * number for number in range(20)]


def endless(folder: str) -> None:
    """Says by a file that it has begun, and works until the pool ends."""
    try:
        with open(os.path.join(folder, str(os.getpid())), "x"):
            pass
        while True:
            check_interrupt()
    except KeyboardInterrupt:
        os.rename(os.path.join(folder, str(os.getpid())), os.path.join(folder, f"{os.getpid()}-left"))
        raise


def started_then_refused(folder: str) -> None:
    """Fails as soon as the endless piece has begun."""
    while not os.listdir(folder):
        pass
    raise InputError("expected less")


def test_other_pieces_leave_when_one_fails(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected less"), ProcessPool(2) as pool:
        list(pool.map_unordered(applied, [(endless, str(tmp_path)), (started_then_refused, str(tmp_path))]))
    (left,) = os.listdir(tmp_path)
    assert left.endswith("-left")


def applied(work: tuple[Callable[[str], None], str]) -> None:
    function, folder = work
    function(folder)


def test_cores() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))
