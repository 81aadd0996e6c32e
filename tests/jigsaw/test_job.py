from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.jigsaw.job import MOST_PIECES, check_jobs, of_last
from tests.jigsaw.made_jobs import job


def test_the_last_share_of_stages() -> None:
    """Half of three stages is one and a half of them, from the last."""
    assert of_last((1.0, 10.0, 100.0), 0.5) == 105.0
    assert of_last((1.0, 10.0, 100.0), 0.0) == 0.0
    assert of_last((1.0, 10.0, 100.0), 1.0) == 111.0
    assert of_last((6.0,), 0.25) == 1.5


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_is_no_less_work(values: list[float], one: float, other: float) -> None:
    assert of_last(values, min(one, other)) <= of_last(values, max(one, other)) <= math.fsum(values) * (1 + 1e-12)


@given(st.integers(1, 6), st.integers(0, 20))
def test_shares_rotate(workers: int, first: int) -> None:
    """Each iteration hands out all shares, and each worker has every share once in as many iterations as workers."""
    shares = tuple((number + 1) / workers for number in range(workers))
    made = job(workers=workers, shares=shares)
    assert sorted(made.share_of(worker, first) for worker in range(workers)) == list(shares)
    for worker in range(workers):
        assert sorted(made.share_of(worker, first + number) for number in range(workers)) == list(shares)


def test_shares_are_of_the_workers_first_iteration() -> None:
    made = job(shares=(1.0, 0.5))
    assert [[made.share_of(worker, number) for worker in (0, 1)] for number in (0, 1, 2)] == [
        [1, 0.5],
        [0.5, 1],
        [1, 0.5],
    ]
    assert made.is_partial
    assert not made.with_full_backward().is_partial


def test_times() -> None:
    made = job(shares=(1.0, 0.5))
    assert made.computing_s == 3 + 2
    assert made.shortest_s == 4 * (3 + 1)


@pytest.mark.parametrize(
    ("shares", "seconds"),
    [
        ((), 1.5),  # ring of four: 2 * 3/4
        ((1.0, 1.0, 1.0, 1.0), 1.5),
        ((1.0, 0.0, 0.0, 0.0), 1.0),  # from one to the others, in a pipeline
        ((0.5, 0.0, 0.0, 0.0), 0.5),  # half of the layers has no gradient
        ((1.0, 0.5, 0.5, 0.5), 0.5 * 1.0 + 0.5 * 1.5),
        ((1.0, 1.0, 0.0, 0.0), 1.5),  # 1/2 + 1, as the ring
    ],
)
def test_seconds_of_gradients(shares: tuple[float, ...], seconds: float) -> None:
    made = job(workers=4, sync_s=0.25, gradient_bytes=(100.0, 100.0), bytes_per_s=200.0, shares=shares)
    assert made.exchange_s == pytest.approx(0.25 + seconds)


def test_one_worker_has_no_bytes_to_exchange() -> None:
    assert job(workers=1, sync_s=0.0, gradient_bytes=(1e9,), bytes_per_s=1.0).exchange_s == 0.0


def test_exchanges_of_fewer_workers_are_not_longer() -> None:
    for workers in range(2, 10):
        whole = job(workers=workers, gradient_bytes=(1.0,), bytes_per_s=1.0).exchange_s
        for computing in range(1, workers):
            shares = (1.0,) * computing + (0.0,) * (workers - computing)
            assert job(workers=workers, gradient_bytes=(1.0,), bytes_per_s=1.0, shares=shares).exchange_s <= whole


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"name": ""}, "job '': name: expected a text on one line, got ''"),
        ({"name": "a\nb"}, r"job 'a\nb': name: expected a text on one line, got 'a\nb'"),
        ({"iterations": 0}, "job 'a': iterations: expected at least 1, got 0"),
        ({"workers": 0}, "job 'a': workers: expected at least 1, got 0"),
        ({"forward_s": 0.0}, "job 'a': forward_s: expected a number above 0, got 0"),
        ({"weight": math.nan}, "job 'a': weight: expected a number above 0, got nan"),
        ({"sync_s": -1.0}, "job 'a': sync_s: expected a number of at least 0, got -1"),
        ({"arrival_s": math.inf}, "job 'a': arrival_s: expected a number of at least 0, got inf"),
        ({"backward_s": (1.0, -2.0)}, "job 'a': backward_s: expected numbers of at least 0, got -2"),
        ({"backward_s": ()}, "job 'a': backward_s: expected at least one number, got none"),
        ({"gradient_bytes": (8.0,)}, "job 'a': bytes_per_s: expected a number above 0 beside gradient_bytes, got 0"),
        ({"shares": (1.0,)}, "job 'a': shares: expected one for each of 2 workers, got 1"),
        ({"shares": (1.0, 1.5)}, "job 'a': shares: expected numbers from 0 to 1, got 1.5"),
        ({"shares": (1.0, math.nan)}, "job 'a': shares: expected numbers from 0 to 1, got nan"),
        (
            {"shares": (0.0, 0.0)},
            "job 'a': shares: expected one above 0, else nothing is trained, got 0 for all workers",
        ),
        ({"arrival_s": 5.0, "deadline_s": 5.0}, "job 'a': deadline_s: expected a time after the arrival at 5, got 5"),
    ],
)
def test_bad_jobs(more: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        job(**more)
    assert str(error.value) == line


def test_bad_sets_of_jobs() -> None:
    for jobs, ranks, line in (
        ([job()], 0, "ranks: expected at least 1, got 0"),
        ([], 2, "jobs: expected at least one, got none"),
        ([job(), job()], 2, "jobs: expected a name for each, got 'a' twice"),
        ([job(), job("b", workers=3)], 2, "job 'b': workers: expected at most the 2 ranks, got 3"),
        (
            [job(iterations=MOST_PIECES)],
            2,
            "jobs: expected at most 500,000 iterations of workers to simulate, got 1,000,000; simulate fewer "
            "iterations of each",
        ),
    ):
        with pytest.raises(InputError) as error:
            check_jobs(jobs, ranks)
        assert str(error.value) == line
