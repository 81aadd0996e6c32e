from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.memory import Memory
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.shifted import recompute_shares
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.recompute import add_recompute
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.dense import dense, peaks, rows, run, spelt

SHIFTED = DENSE_SCHEDULES["1f1b-shifted"]


def test_small_table() -> None:
    assert rows(dense("1f1b-shifted", 4, 5)) == [
        spelt("F0 F1 F2 F3 REC0 B0 F4 REC1 B1 REC2 B2 REC3 B3 REC4 B4", 0),
        spelt("F0 F1 F2 REC0 B0 F3 REC1 B1 F4 REC2 B2 REC3 B3 REC4 B4", 1),
        spelt("F0 F1 F2 REC0 B0 REC1 B1 F3 REC2 B2 F4 REC3 B3 REC4 B4", 2),
        spelt("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4", 3),
    ]


def test_published_shares() -> None:
    assert recompute_shares(0.5, 4) == (0.5, 0.25, 0, 0)
    assert recompute_shares(1, 4) == (1, 1, 1, 0)
    assert recompute_shares(0, 3) == (0, 0, 0)
    assert recompute_shares(0.5, 1) == (0,)
    with pytest.raises(ScheduleError, match=r"the recomputed share must be 0 to 1, got 1\.5"):
        recompute_shares(1.5, 4)


@pytest.mark.parametrize("micro", [4, 8, 32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_recomputation_leaves_the_critical_path(ranks: int, micro: int) -> None:
    """M (F + R + B) + (P - 1)(F + B) if every stage recomputes; 2R less without the last; one more R less here."""
    plain = dense("1f1b", ranks, micro)
    everywhere = simulate(add_recompute(plain, dict.fromkeys(range(ranks), 1.0))).makespan
    assert everywhere == 4 * micro + 3 * (ranks - 1)
    assert simulate(add_recompute(plain, dict.fromkeys(range(ranks - 1), 1.0))).makespan == everywhere - 2
    result = run("1f1b-shifted", ranks, micro)
    assert result.makespan == everywhere - 3
    assert peaks(result) == [min(micro, max(ranks - rank, 3)) for rank in range(ranks - 1)] + [1]


def test_recomputation_runs_while_the_gradient_is_under_way() -> None:
    result = run("1f1b-shifted", 4, 8)
    finish = {timed.action.text: timed.finish for timed in result.timed}
    start = {timed.action.text: timed.start for timed in result.timed}
    assert finish["0REC0"] < finish["1B0"] == start["0B0"]


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 1])
def test_all_ranks_need_about_the_memory_of_the_first(share: float) -> None:
    program = SHIFTED.configured({"recompute_share": share}).build(chain(8, 32))
    check(program)
    one = Memory(activation_bytes=dict.fromkeys(range(8), 1))
    held = [use.peak_bytes for use in simulate(program, memory=one).lanes.values()]
    assert held[0] == max(held), "of the 8 micro-batches of rank 0, those without REC, and the one of the backward"
    assert 8 * (1 - share) <= held[0] <= 8 * (1 - share) + 1


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(ScheduleError, match="1f1b-shifted: micro-batches must be at least 4, got 3"):
        dense("1f1b-shifted", 2, 3)
    assert "REC" not in rows(dense("1f1b-shifted", 1, 4))[0]
