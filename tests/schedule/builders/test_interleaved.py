from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from tests.schedule.dense import SIZES, dense, peaks, rows, run


def test_small_table() -> None:
    assert rows(dense("interleaved", 2, 4)) == [
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3",
    ]


def test_rounds_are_at_least_as_long_as_the_ranks() -> None:
    """Megatron-LM's order of chunks: a round through all chunks of the rank, then the next round."""

    def chunk_order(micro: int) -> str:
        return "".join(cell[0] for cell in rows(dense("interleaved", 2, micro))[0].split(",") if "F" in cell)

    assert chunk_order(6) == "002200220022"
    assert chunk_order(3) == "000222"


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_closed_forms(ranks: int, micro: int, chunks: int) -> None:
    """In units of a chunk's time: M (F + B) v + (P - 1) (F + B)."""
    result = run("interleaved", ranks, micro, chunks=chunks)
    assert result.makespan == (chunks * micro + ranks - 1) * 3
    assert result.bubble == pytest.approx((ranks - 1) / (chunks * micro))
    ahead = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    assert peaks(result) == [min(chunks * micro, number) for number in ahead]


def test_published_peaks() -> None:
    assert peaks(run("interleaved", 4, 16, chunks=2)) == [11, 9, 7, 5]
    assert peaks(run("interleaved", 4, 16, chunks=4)) == [19, 17, 15, 13]


@pytest.mark.parametrize(("ranks", "micro"), [(2, 5), (4, 9), (4, 13)])
def test_uneven_rounds_are_refused(ranks: int, micro: int) -> None:
    with pytest.raises(ScheduleError, match=rf"multiple of {micro // ranks}, .* got {micro}"):
        dense("interleaved", ranks, micro)
