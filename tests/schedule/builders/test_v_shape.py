"""v-half and v-min on unit costs. In chunks: a micro-batch of 1F1B's stage is two of them."""

from __future__ import annotations

import pytest

from tests.schedule.dense import peaks, run

RANKS = (1, 2, 3, 4, 5, 6, 8, 12)
ONE_F_ONE_B = 6  # F + B of 1F1B's stage, twice the size, per rank that a batch fills and drains


@pytest.mark.parametrize("micro_per_rank", [1, 3])
@pytest.mark.parametrize("ranks", RANKS)
def test_peak_memory(ranks: int, micro_per_rank: int) -> None:
    """P // 2 + 1 and (P + 4) // 3 micro-batches on the rank with most, of the P of 1F1B and zb-v."""
    micro = micro_per_rank * ranks
    assert max(peaks(run("v-half", ranks, micro))) == 2 * min(micro, ranks // 2 + 1)
    assert max(peaks(run("v-min", ranks, micro))) == 2 * min(micro, (ranks + 4) // 3)


@pytest.mark.parametrize("ranks", [ranks for ranks in RANKS if ranks > 1])
def test_v_min_waits_two_thirds_as_long_as_1f1b(ranks: int) -> None:
    """4 P - 5 on rank 0, 2 less per rank; on the last rank 2 P - 2, whatever the number of micro-batches."""
    expected = [4 * ranks - 5 - 2 * rank for rank in range(ranks - 1)] + [2 * ranks - 2]
    for micro in (1, ranks, 3 * ranks):
        result = run("v-min", ranks, micro)
        assert [use.span_idle for use in result.lanes.values()] == expected
        assert result.makespan == 6 * micro + expected[0]
    assert expected[0] < 2 / 3 * ONE_F_ONE_B * (ranks - 1)


@pytest.mark.parametrize("ranks", [ranks for ranks in RANKS if ranks > 2])
def test_v_half_waits_about_half_as_long_as_1f1b(ranks: int) -> None:
    """13 P / 4 - 5 on rank 0 (odd P: - 17 / 4), rounded down; 2 less per rank, 1 more on the last.

    The authors' curve is 3 P.
    """
    first = (13 * ranks - (17 if ranks % 2 else 20)) // 4
    expected = [first - 2 * rank for rank in range(ranks - 1)] + [first - 2 * ranks + 3]
    for micro in (ranks, 3 * ranks):
        result = run("v-half", ranks, micro)
        assert [use.span_idle for use in result.lanes.values()] == expected
        assert result.makespan == 6 * micro + first
    assert first <= 0.55 * ONE_F_ONE_B * (ranks - 1)


def test_less_memory_costs_time() -> None:
    spans = [run(name, 8, 16).makespan for name in ("zb-v", "v-half", "v-min")]
    assert spans == sorted(spans)
    assert spans[-1] < 2 * run("1f1b", 8, 16).makespan, "1f1b's stages take twice as long"


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_unequal_costs_keep_the_memory(name: str) -> None:
    costs = {"F": 3, "I": 4, "W": 2}
    assert peaks(run(name, 4, 8, costs=costs)) == peaks(run(name, 4, 8))
