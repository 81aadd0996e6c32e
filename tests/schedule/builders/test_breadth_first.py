from __future__ import annotations

import pytest

from tests.schedule.dense import SIZES, dense, peaks, rows, run


def test_small_table() -> None:
    assert rows(dense("breadth-first", 2, 4)) == [
        "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,2B3,2B2,2B1,2B0,0B3,0B2,0B1,0B0",
        "1F0,1F1,1F2,1F3,3F0,3F1,3F2,3F3,3B3,3B2,3B1,3B0,1B3,1B2,1B1,1B0",
    ]


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_closed_forms(ranks: int, micro: int, chunks: int) -> None:
    result = run("breadth-first", ranks, micro, chunks=chunks)
    assert result.makespan == (chunks * micro + ranks - 1) * 3
    assert result.bubble == pytest.approx((ranks - 1) / (chunks * micro))
    assert peaks(result) == [chunks * micro] * ranks
