from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.schedule.check import check
from bagpipe.schedule.dynamic import backward_first, dynamic
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.lower import add_optimizer, add_sends
from bagpipe.schedule.program import Edge, Program
from bagpipe.schedule.simulate import simulate
from tests.schedule.dense import dense, peaks, rows
from tests.schedule.tables import lanes, programs


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_a_limit_where_batches_enter_gives_1f1b_s_time_and_memory(ranks: int, micro: int) -> None:
    """AxoNN: rank 0 lets in as many micro-batches as there are ranks, everybody else takes what has come."""
    found = dynamic(dense("gpipe", ranks, micro), limits={0: ranks})
    check(found)
    result = simulate(found)
    assert result.makespan == (micro + ranks - 1) * 3
    assert max(peaks(result)) <= ranks


def test_1f1b_s_limits_give_1f1b() -> None:
    assert rows(dynamic(dense("gpipe", 4, 8), limits={s: 4 - s for s in range(4)})) == rows(dense("1f1b", 4, 8))


def test_without_limits_the_last_rank_alternates() -> None:
    assert rows(dynamic(dense("gpipe", 2, 3)))[1] == "1F0,1B0,1F1,1B1,1F2,1B2"


def test_the_priority_decides_among_what_is_ready() -> None:
    forwards_first = dynamic(dense("gpipe", 1, 3), lambda action: (action.op != "F", action.index or 0))
    assert rows(forwards_first) == ["0F0,0F1,0F2,0B0,0B1,0B2"]
    assert rows(dynamic(dense("gpipe", 1, 3), lambda action: (action.op != "F", -(action.index or 0)))) == [
        "0F2,0F1,0F0,0B2,0B1,0B0"
    ]


def test_weight_gradients_fill_the_gaps() -> None:
    """Split backwards leave the rank something to do while it waits: less time than whole ones at equal limits."""
    limits = dict.fromkeys(range(4), 4)
    found = dynamic(dense("zb-h1", 4, 8), limits=limits)
    check(found)
    assert simulate(found).makespan < simulate(dynamic(dense("gpipe", 4, 8), limits=limits)).makespan


def test_batch_ops_take_their_turn() -> None:
    found = dynamic(add_optimizer(dense("gpipe", 2, 2)), backward_first)
    check(found)
    assert [row.split(",")[-1] for row in rows(found)] == ["0OPT0", "1OPT0"]


def test_what_it_does_not_take() -> None:
    program = dense("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="expected compute actions only"):
        dynamic(add_sends(program, {"rank0": 0, "rank1": 1}))
    with pytest.raises(ScheduleError, match="lane rank0 cannot go on: 0F0 never gets ready"):
        dynamic(program, limits={0: 0})
    cycle = (Edge(src="X_PUT", dst="X_GET"), Edge(src="X_GET", dst="X_PUT"))
    with pytest.raises(ScheduleError, match="lane a cannot go on: 0X_GET0 never gets ready"):
        dynamic(Program(lanes=lanes(a="0X_GET0", b="0X_PUT0"), edges=cycle))


@settings(max_examples=60)
@given(programs(), st.integers(0, 3))
def test_whatever_it_finds_is_valid_and_does_not_depend_on_the_order_it_was_given(
    drawn: tuple[Program, dict[str, int]], latency: int
) -> None:
    program, _ = drawn
    found = dynamic(program, latency=latency)
    check(found)
    backwards = dataclasses.replace(program, lanes={lane: row[::-1] for lane, row in program.lanes.items()})
    again = dynamic(backwards, lambda action: (*backward_first(action), action.stage), latency=latency)
    check(again)
    assert {lane: sorted(map(str, row)) for lane, row in found.lanes.items()} == {
        lane: sorted(map(str, row)) for lane, row in again.lanes.items()
    }
