from __future__ import annotations

import pytest

from tests.schedule.dense import SIZES, dense, peaks, rows, run, spelt


def test_small_tables() -> None:
    assert rows(dense("1f1b", 2, 3)) == ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]
    assert rows(dense("1f1b", 4, 6)) == [
        spelt("F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", 0),
        spelt("F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5", 1),
        spelt("F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5", 2),
        spelt("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5", 3),
    ]


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_1f1b_closed_forms(ranks: int, micro: int) -> None:
    result = run("1f1b", ranks, micro)
    assert result.makespan == (micro + ranks - 1) * 3
    assert result.bubble == pytest.approx((ranks - 1) / micro)
    assert peaks(result) == [min(micro, ranks - rank) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_eager_closed_forms(ranks: int, micro: int) -> None:
    result = run("eager-1f1b", ranks, micro)
    assert result.makespan == (micro + ranks - 1) * 3
    assert peaks(result) == [min(micro, 2 * (ranks - rank) - 1) for rank in range(ranks)]


@pytest.mark.parametrize(("latency", "plain", "eager"), [(0, 57, 57), (0.5, 71, 60), (1, 85, 63)])
def test_eager_hides_the_latency_of_a_hop(latency: float, plain: int, eager: int) -> None:
    assert run("1f1b", 4, 16, latency=latency).makespan == plain
    assert run("eager-1f1b", 4, 16, latency=latency).makespan == eager


def test_fewer_micro_batches_than_ranks() -> None:
    assert peaks(run("1f1b", 4, 2)) == [2, 2, 2, 1]
    assert peaks(run("eager-1f1b", 4, 1)) == [1, 1, 1, 1]
