"""A schedule over many batches: PipeDream's 1F1B, which never drains the pipeline between batches."""

from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import RUNNER_RULES, check, check_loop
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.ir.stage_graph import StageGraph, chain, dense_loop
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.schedule import DenseSchedule
from tests.schedule.dense import peaks, rows
from tests.schedule.period import period


def one_f_one_b_without_flush(graph: StageGraph, chunks: int) -> Loop:
    """One stage per rank, P - r micro-batches in flight on rank r, OPT after the last backward of each batch."""
    micro = graph.microbatches
    lanes = []
    for stage in range(graph.num_stages):
        ahead = graph.num_stages - 1 - stage
        turn = [
            template
            for index in range(micro)
            for template in (
                _template("F", stage, index + ahead, micro),
                _template("B", stage, index, micro),
            )
        ]
        lanes.append((*turn, Template(op="OPT", stage=stage)))
    updates = [Edge(src="W", src_stage=s, dst="OPT", dst_stage=s) for s in range(graph.num_stages)]
    return dense_loop(graph, lanes, semantics="stash", edges=updates)


def _template(op: str, stage: int, index: int, units: int) -> Template:
    """The action that turn b of the lane does for unit ``b * units + index``; `index` can lie in another batch."""
    offset, unit = divmod(index, units)
    return Template(op=op, stage=stage, unit=unit, offset=offset)


PIPEDREAM = DenseSchedule(name="pipedream", summary="1F1B without a flush", builder=one_f_one_b_without_flush)
SIZES = [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (3, 8)]


def program(ranks: int, micro: int, batches: int) -> Program:
    return PIPEDREAM.build(chain(ranks, micro), num_batches=batches)


def test_forwards_of_the_next_batch_come_before_the_last_backwards() -> None:
    assert rows(program(2, 2, 2)) == [
        "0F0,0F1,0B0,0F2,0B1,0OPT0,0F3,0B2,0B3,0OPT1",
        "1F0,1B0,1F1,1B1,1OPT0,1F2,1B2,1F3,1B3,1OPT1",
    ]


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_it_is_valid_for_any_number_of_batches(ranks: int, micro: int) -> None:
    check_loop(one_f_one_b_without_flush(chain(ranks, micro), 1))
    for batches in (1, 2, 5):
        unrolled = program(ranks, micro, batches)
        check(unrolled)
        assert unrolled.num_batches() == batches


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_no_rank_idles_in_the_steady_state(ranks: int, micro: int) -> None:
    """One more batch takes as long as a rank's own work, M (F + B) + OPT: no bubble except one fill and drain."""
    load = 3 * micro + 1
    assert period(one_f_one_b_without_flush(chain(ranks, micro), 1)).value == load
    ends = {batches: simulate(program(ranks, micro, batches)).makespan for batches in (7, 8, 90)}
    assert ends[8] - ends[7] == load
    assert ends[90] - ends[8] == 82 * load


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_is_that_of_1f1b_with_a_flush(ranks: int) -> None:
    assert peaks(simulate(program(ranks, 2, 9))) == [ranks - rank for rank in range(ranks)]


def test_it_is_refused_for_synchronous_training() -> None:
    with pytest.raises(ScheduleError, match="pipedream: expected a synchronous schedule, got one of semantics stash"):
        step_program(chain(2, 1), [(0, True)], PIPEDREAM)
    with pytest.raises(ScheduleError, match="source 0F must be performed once per batch, found 2"):
        check_loop(one_f_one_b_without_flush(chain(1, 2), 1), RUNNER_RULES)
