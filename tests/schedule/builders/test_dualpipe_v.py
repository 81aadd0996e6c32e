from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from tests.schedule.dense import SIZES, dense, peaks, rows, run


def test_small_table() -> None:
    assert rows(dense("dualpipe-v", 2, 4)) == [
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,"
        "0I2,0W2,0I3,0W3",
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,"
        "2W3,1W3",
    ]


@pytest.mark.parametrize("overlap", [3, 2.2])
@pytest.mark.parametrize(("ranks", "micro"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_bubble_formula(ranks: int, micro: int, overlap: float) -> None:
    """(PP / 2 - 1) (F&B + B - 3 W), PP = 2 P stages: 2, 6, 14, and 1.2, 3.6, 8.4 with F&B = 2.2, on the idlest rank."""
    result = run("dualpipe-v", ranks, micro, costs={"OVERLAP_F_B": overlap})
    assert max(use.idle for use in result.lanes.values()) == pytest.approx((ranks - 1) * (overlap + 2 - 3))
    assert peaks(result) == [2 * ranks + 1] * ranks


def test_an_overlap_costs_its_parts_by_default() -> None:
    assert run("dualpipe-v", 4, 8).makespan == run("dualpipe-v", 4, 8, costs={"OVERLAP_F_B": 3}).makespan == 6 * 8 + 6


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(
        ScheduleError, match="dualpipe-v: micro-batches must be at least 8, the number of stages, got 7"
    ):
        dense("dualpipe-v", 4, 7)
