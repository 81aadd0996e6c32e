from __future__ import annotations

import pytest

from tests.schedule.dense import SIZES, dense, peaks, rows, run


def test_small_table() -> None:
    assert rows(dense("gpipe", 2, 3)) == ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2"]


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_closed_forms(ranks: int, micro: int) -> None:
    result = run("gpipe", ranks, micro)
    assert result.makespan == (micro + ranks - 1) * 3
    assert result.bubble == pytest.approx((ranks - 1) / micro)
    assert peaks(result) == [micro] * ranks
