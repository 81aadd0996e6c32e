from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from tests.schedule.dense import SIZES, dense, peaks, rows, run

ONE_SLOT = {"F": 1, "B": 1}


def test_small_table() -> None:
    assert rows(dense("chimera", 4, 4)) == [
        "0F0,0F1,3F0~1,3B0~1,3F1~1,3B1~1,0B0,0B1",
        "1F0,2F0~1,1F1,2F1~1,2B0~1,1B0,2B1~1,1B1",
        "1F0~1,2F0,1F1~1,2F1,2B0,1B0~1,2B1,1B1~1",
        "0F0~1,0F1~1,3F0,3B0,3F1,3B1,0B0~1,0B1~1",
    ]


@pytest.mark.parametrize(("ranks", "micro"), [*SIZES, (6, 6), (6, 18)])
def test_closed_forms(ranks: int, micro: int) -> None:
    """With F = B every rank waits P - 2 slots for any number of units; memory is P / 2 + 1 to P."""
    result = run("chimera", ranks, micro, costs=ONE_SLOT)
    assert result.makespan == 2 * micro + ranks - 2
    assert {use.idle for use in result.lanes.values()} == {ranks - 2}
    from_the_ends = [min(rank, ranks - 1 - rank) for rank in range(ranks)]
    assert peaks(result) == [ranks // 2 + 1 + distance for distance in from_the_ends]


def test_published_peaks() -> None:
    assert peaks(run("chimera", 4, 4)) == [3, 4, 4, 3]
    assert peaks(run("chimera", 8, 8)) == [5, 6, 7, 8, 8, 7, 6, 5]


@pytest.mark.parametrize(("ranks", "span"), [(4, 16), (6, 26)])
def test_a_unit_s_critical_path(ranks: int, span: int) -> None:
    """4 F + 6 B at P = 4, 6 F + 10 B at P = 6."""
    assert run("chimera", ranks, ranks).makespan == span


def test_slow_backwards_leave_bubbles_in_every_unit() -> None:
    assert (run("chimera", 4, 8).makespan, run("1f1b", 4, 8).makespan) == (30, 33)
    assert (run("chimera", 4, 16).makespan, run("1f1b", 4, 16).makespan) == (58, 57)


@pytest.mark.parametrize(("ranks", "units"), [(2, 1), (2, 3), (4, 1), (4, 2), (6, 3), (8, 2), (16, 1)])
def test_doubled_forwards_leave_no_bubble_between_units(ranks: int, units: int) -> None:
    """With B = 2F a rank waits 3 (P / 2 - 1) F in all. The published bound, 2 (P - 2) F, sends both forwards together.

    Memory is that of a slot's two micro-batches: 3 P / 2 + 1 to 2 P.
    """
    micro = 2 * ranks * units
    result = run("chimera-doubling", ranks, micro)
    assert {use.idle for use in result.lanes.values()} == {3 * (ranks // 2 - 1)}
    assert result.makespan == 3 * micro + 3 * (ranks // 2 - 1) <= 3 * micro + 2 * (ranks - 2)
    from_the_ends = [min(rank, ranks - 1 - rank) for rank in range(ranks)]
    assert peaks(result) == [3 * ranks // 2 + 1 + distance for distance in from_the_ends]


@pytest.mark.parametrize(("ranks", "units"), [(2, 1), (4, 1), (4, 4), (6, 3), (8, 2)])
def test_halved_micro_batches_wait_half_as_long(ranks: int, units: int) -> None:
    """A half takes F / 2 and B / 2, and keeps half of the activations: at most those of P micro-batches."""
    micro = ranks * units
    result = run("chimera-halving", ranks, micro, costs={"F": 0.5, "B": 1})
    assert result.makespan == 3 * micro + 1.5 * (ranks // 2 - 1) <= 3 * micro + ranks - 2
    assert max(peaks(result)) == 2 * ranks
    assert rows(dense("chimera-halving", ranks, micro)) == rows(dense("chimera-doubling", ranks, 2 * micro))


def test_doubling_and_halving_beat_1f1b_where_chimera_does_not() -> None:
    doubled, whole = run("chimera-doubling", 4, 16), run("chimera", 4, 16)
    halved = run("chimera-halving", 4, 16, costs={"F": 0.5, "B": 1})
    assert (halved.makespan, doubled.makespan, run("1f1b", 4, 16).makespan, whole.makespan) == (49.5, 51, 57, 58)


def test_a_last_unit_may_be_smaller() -> None:
    """It leaves empty slots: 2 more than whole units would."""
    assert run("chimera", 4, 6, costs=ONE_SLOT).makespan == 16 == run("chimera", 4, 8, costs=ONE_SLOT).makespan - 2


@pytest.mark.parametrize(
    ("ranks", "micro", "message"), [(3, 4, "stages must be a multiple of 2, got 3"), (4, 5, "micro-batches .* got 5")]
)
def test_odd_numbers_are_refused(ranks: int, micro: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        dense("chimera", ranks, micro)
    with pytest.raises(ScheduleError, match=f"chimera-doubling: {message}"):
        dense("chimera-doubling", ranks, micro)


def test_any_number_of_micro_batches_can_be_halved() -> None:
    assert run("chimera-halving", 2, 3).makespan == run("chimera-doubling", 2, 6).makespan
    with pytest.raises(ScheduleError, match="chimera-halving: stages must be a multiple of 2, got 3"):
        dense("chimera-halving", 3, 4)
