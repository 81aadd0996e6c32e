from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.graph import Graph, partner
from bagpipe.schedule.ir.program import Edge, Program, Stage
from tests.schedule.tables import lanes


def waits_for(graph: Graph, text: str) -> set[str]:
    node = next(n for n, action in enumerate(graph.actions) if action.text == text)
    return {graph.actions[p.node].text for p in graph.predecessors[node]}


@pytest.mark.parametrize(
    ("send", "recv"),
    [("0SEND_F3", "1RECV_F3"), ("2SEND_B0", "1RECV_B0"), ("0SENDX_F1:3", "3RECVX_F1:0"), ("1SEND_F0~1", "2RECV_F0~1")],
)
def test_partners(send: str, recv: str) -> None:
    assert partner(parse(send)).text == recv


def test_predecessors_are_lane_order_edges_and_sends() -> None:
    program = Program(lanes=lanes(a="0F0 0SEND_F0 0F1", b="1RECV_F0 1F0"))
    graph = Graph(program)
    assert waits_for(graph, "1RECV_F0") == {"0SEND_F0"}
    assert waits_for(graph, "0F1") == {"0SEND_F0"}


def test_a_full_backward_stands_for_both_halves() -> None:
    edges = (Edge(src="I", dst="I", src_stage=1, dst_stage=0), Edge(src="W", dst="OPT"))
    program = Program(
        lanes=lanes(a="0B0 0I1 0W1 0OPT0", b="1I0 1B1"),
        edges=edges,
        stages=(Stage(number=0, micro_per_batch=2), Stage(number=1, micro_per_batch=2)),
    )
    graph = Graph(program)
    assert waits_for(graph, "0B0") == {"1I0"}
    assert waits_for(graph, "0I1") == {"1B1", "0B0"}
    assert waits_for(graph, "0OPT0") == {"0B0", "0W1"}


def test_an_overlap_waits_for_what_its_parts_need_but_not_for_itself() -> None:
    edges = (Edge(src="F", dst="F", src_stage=0, dst_stage=1), Edge(src="F", dst="B", src_stage=1, dst_stage=1))
    graph = Graph(Program(lanes=lanes(a="0F0", b="(1F0;1B0)OVERLAP_F_B"), edges=edges))
    assert waits_for(graph, "(1F0;1B0)OVERLAP_F_B") == {"0F0"}


def test_pipes_are_kept_apart_between_micro_batches_and_joined_for_the_optimizer() -> None:
    edges = (Edge(src="F", dst="B"), Edge(src="B", dst="OPT"))
    graph = Graph(Program(lanes=lanes(a="0F0 0F0~1", b="0B0~1 0B0", c="0OPT0"), edges=edges))
    assert waits_for(graph, "0B0~1") == {"0F0~1"}
    assert waits_for(graph, "0OPT0") == {"0B0", "0B0~1"}


def test_hazards_come_from_the_plan_and_else_from_the_constant() -> None:
    program = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, direct=True).unroll(3)
    assert "0X_WRITEBACK2" in waits_for(Graph(program), "0X_FETCH2")
    planned = {"fetch_after": lambda b: -1, "evict_after": lambda b: b - 2}
    graph = Graph(program, planned)
    assert "0X_WRITEBACK2" not in waits_for(graph, "0X_FETCH2")
    assert "0X_UPDATE0" in waits_for(graph, "0X_EVICT2")
    with pytest.raises(ScheduleError, match="makes batch 0 wait for the later batch 1"):
        Graph(program, {**planned, "evict_after": lambda b: b + 1})


def test_a_cycle_is_spelled() -> None:
    edges = (Edge(src="X_INSERT", dst="X_FETCH"), Edge(src="X_FETCH", dst="X_INSERT"))
    graph = Graph(Program(lanes=lanes(a="0X_READ0 0X_FETCH0", b="0X_INSERT0"), edges=edges))
    with pytest.raises(ScheduleError, match="deadlock: 0X_FETCH0 waits for 0X_INSERT0 waits for 0X_FETCH0"):
        graph.order()


def test_a_cycle_error_is_short() -> None:
    """Actions of a lane between two of the cycle are left out: the later one waits for the earlier anyway."""
    edges = (Edge(src="X_INSERT", dst="X_READ"), Edge(src="X_EVICT", dst="X_FETCH"))
    program = Program(lanes=lanes(a="0X_READ0 0F0 0F1 0F2 0X_EVICT0", b="0X_FETCH0 0F3 0F4 0X_INSERT0"), edges=edges)
    with pytest.raises(ScheduleError) as error:
        Graph(program).order()
    assert str(error.value) == (
        "deadlock: 0X_READ0 waits for 0X_INSERT0 waits for 0X_FETCH0 waits for 0X_EVICT0 waits for 0X_READ0"
    )


def test_parts_of_an_overlap_may_belong_to_different_pipes() -> None:
    edges = (Edge(src="F", dst="F", src_stage=0, dst_stage=1),)
    graph = Graph(Program(lanes=lanes(a="(0F0;2B0~1)OVERLAP_F_B 0F0~1", b="1F0~1"), edges=edges))
    assert waits_for(graph, "1F0~1") == {"0F0~1"}


def test_crossed_sends_and_receives_deadlock() -> None:
    program = Program(lanes=lanes(a="0RECV_B0 0SEND_F0", b="1RECV_F0 1SEND_B0"))
    with pytest.raises(ScheduleError, match="deadlock"):
        Graph(program).order()


def test_waiting_for_a_missing_action_is_refused() -> None:
    program = Program(lanes=lanes(a="0X_INSERT0"), edges=(Edge(src="X_FETCH", dst="X_INSERT"),))
    with pytest.raises(ScheduleError, match="0X_INSERT0 waits for 0X_FETCH0, which no lane performs"):
        Graph(program)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 6), st.booleans())
def test_the_order_is_topological(depth: int, ahead: int, write: int, micro: int, batches: int, direct: bool) -> None:
    loop = prefetch_loop(prefetch_depth=depth, read_ahead=ahead, write_depth=write, microbatches=micro, direct=direct)
    graph = Graph(loop.unroll(batches))
    order = graph.order()
    place = {node: position for position, node in enumerate(order)}
    assert sorted(order) == list(range(len(graph.actions)))
    assert all(place[p.node] < place[node] for node in order for p in graph.predecessors[node])
