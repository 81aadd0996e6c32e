from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from torch.distributed.pipelining import schedules as torch_schedules

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.formats.torch_csv import torch_cells
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Program, Stage
from bagpipe.schedule.ir.stage_graph import StageGraph, chain, dense_program
from bagpipe.schedule.lowering.sends import add_sends, defer_receives
from tests.schedule.dense import dense, rows
from tests.schedule.tables import TORCH, TORCH_SIZES, lanes, programs, torch_rows, torch_text


def homes(program: Program) -> dict[str, int]:
    """One process per lane."""
    return {lane: number for number, lane in enumerate(program.lanes)}


def spelt(program: Program) -> dict[str, str]:
    return {lane: " ".join(action.text for action in actions) for lane, actions in program.lanes.items()}


def test_a_send_follows_its_value_and_a_receive_comes_as_early_as_it_can() -> None:
    program = dense("1f1b", 2, 2)
    assert spelt(add_sends(program, homes(program))) == {
        "rank0": "0F0 0SENDX_F0:1 0F1 0SENDX_F1:1 0RECVX_B0:1 0B0 0RECVX_B1:1 0B1",
        "rank1": "1RECVX_F0:0 1F0 1RECVX_F1:0 1B0 1SENDX_B0:0 1F1 1B1 1SENDX_B1:0",
    }


def test_one_process_sends_nothing() -> None:
    program = dense("1f1b", 3, 4)
    assert add_sends(program, dict.fromkeys(program.lanes, 0)) == program


def test_micro_batches_of_different_sizes() -> None:
    """Three of stage 0 and two of stage 1: both need the middle one, which is sent once."""
    graph = StageGraph(micro_per_batch=(3, 2), edges=((0, 1),))
    table = lanes(rank0="0F0 0F1 0F2 0B0 0B1 0B2", rank1="1F0 1F1 1B0 1B1")
    lowered = add_sends(dense_program(graph, list(table.values())), {"rank0": 0, "rank1": 1})
    check(lowered)
    assert spelt(lowered) == {
        "rank0": "0F0 0SENDX_F0:1 0F1 0SENDX_F1:1 0F2 0SENDX_F2:1 0RECVX_B0:1 0B0 0RECVX_B1:1 0B1 0B2",
        "rank1": "1RECVX_F0:0 1RECVX_F1:0 1F0 1RECVX_F2:0 1F1 1B0 1SENDX_B0:0 1B1 1SENDX_B1:0",
    }


def test_the_size_of_the_step_is_exchanged_without_messages() -> None:
    edges = tuple(Edge(src="PRECOND", src_stage=stage, dst="X_KL") for stage in (0, 1))
    program = Program(lanes=lanes(a="0PRECOND0 0X_KL0", b="1PRECOND0"), edges=edges)
    assert add_sends(program, {"a": 0, "b": 1}).lanes == program.lanes
    with pytest.raises(ScheduleError, match="only outputs and gradients pass between processes"):
        add_sends(dataclasses.replace(program, edges=(Edge(src="PRECOND", dst="OPT", src_stage=1),), lanes=lanes(
            a="0OPT0", b="1PRECOND0")), {"a": 0, "b": 1})  # fmt: skip


SOURCE = Program(
    lanes=lanes(a="2X_EMBED0 0F0 0F1 0B0 0B1 2X_EMBED_GRAD0", b="1F0 1F1 1B0 1B1"),
    edges=(
        *(Edge(src="X_EMBED", src_stage=2, dst="F", dst_stage=s) for s in (0, 1)),
        *(Edge(src="I", src_stage=s, dst="X_EMBED_GRAD", dst_stage=2) for s in (0, 1)),
    ),
    stages=tuple(Stage(number=n, micro_per_batch=2) for n in range(3)),
)


def test_a_source_sends_its_batch_in_micro_batches_and_takes_their_gradients() -> None:
    lowered = add_sends(SOURCE, {"a": 0, "b": 1})
    check(lowered)
    assert spelt(lowered) == {
        "a": "2X_EMBED0 2SENDX_F0:1 2SENDX_F1:1 0F0 0F1 2RECVX_B0:1 0B0 2RECVX_B1:1 0B1 2X_EMBED_GRAD0",
        "b": "1RECVX_F0:2 1RECVX_F1:2 1F0 1F1 1B0 1SENDX_B0:2 1B1 1SENDX_B1:2",
    }


def test_a_value_with_several_users_is_sent_to_each_stage_in_the_order_of_the_edges() -> None:
    graph = StageGraph(micro_per_batch=(1, 1, 1), edges=((0, 2), (0, 1), (1, 2)))
    program = dense_program(graph, list(lanes(a="0F0 0B0", b="1F0 1B0", c="2F0 2B0").values()))
    lowered = add_sends(program, {"rank0": 0, "rank1": 1, "rank2": 1})
    check(lowered)
    assert spelt(lowered) == {
        "rank0": "0F0 0SENDX_F0:2 0SENDX_F0:1 0RECVX_B0:2 0RECVX_B0:1 0B0",
        "rank1": "1RECVX_F0:0 1F0 1B0 1SENDX_B0:0",
        "rank2": "2RECVX_F0:0 2F0 2B0 2SENDX_B0:0",
    }


def test_pipes_are_carried() -> None:
    program = dense("chimera", 2, 2)
    lowered = add_sends(program, homes(program), torch_names=True)
    check(lowered)
    assert "0SEND_F0~1" in spelt(lowered)["rank1"]
    assert "1RECV_F0~1" in spelt(lowered)["rank0"]


def test_torch_names_are_for_neighbours_only() -> None:
    graph = StageGraph(micro_per_batch=(1, 1, 1), edges=((0, 1), (1, 2), (0, 2)))
    program = dense_program(graph, list(lanes(a="0F0 0B0", b="1F0 1B0", c="2F0 2B0").values()))
    text = spelt(add_sends(program, homes(program), torch_names=True))["rank0"]
    assert text == "0F0 0SEND_F0 0SENDX_F0:2 0RECVX_B0:2 0RECV_B0 0B0"


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (Program(lanes=lanes(a="0F0", c="0F1")), "lane c has no process; there are a, b"),
        (
            Program(lanes=lanes(a="0B0", b="0OPT0"), edges=(Edge(src="W", dst="OPT"),)),
            r"edge 0OPT\(b\) <- 0W\(b\) leads from process 0 to 1; only outputs and gradients",
        ),
        (
            Program(lanes=lanes(a="0F0", b="0B0"), edges=(Edge(src="F", dst="I"),)),
            "leads from process 0 to 1; only outputs and gradients pass between processes, to other stages",
        ),
        (
            dense_program(chain(2, 2), list(lanes(a="0F0 0B0 0F1 0B1", b="1F0 1F1 1B0 1B1").values())),
            "deadlock: 0B0 waits for 1B0 waits for 1F1 waits for 0F1 waits for 0B0",
        ),
    ],
)
def test_invalid_sends_are_refused(program: Program, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        add_sends(program, {"a": 0, "b": 1, "rank0": 0, "rank1": 1})


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("ranks", "micro"), TORCH_SIZES)
def test_messages_are_where_torch_puts_them(name: str, ranks: int, micro: int) -> None:
    table = torch_rows(name, ranks, micro)
    cells = torch_cells(torch_text(table))
    stages = ranks * TORCH[name]
    program = dense_program(chain(stages, micro), [[cell for cell in row if cell] for row in cells.values()])
    rank_of = {
        atom.stage: rank
        for rank, row in enumerate(program.lanes.values())
        for action in row
        for atom in action.atoms
    }  # fmt: skip

    ours = add_sends(program, homes(program), torch_names=True, cells=cells)
    theirs = torch_schedules._add_send_recv(table, rank_of.__getitem__, stages)
    assert rows(ours) == torch_text(theirs).splitlines()
    check(ours)

    deferred = torch_schedules._defer_recv_ops(theirs, rank_of.__getitem__)
    assert rows(defer_receives(ours, homes(ours), in_order=False)) == torch_text(deferred).splitlines()
    check(defer_receives(ours, homes(ours)))


def test_deferred_receives_come_right_before_their_use() -> None:
    program = dense("gpipe", 2, 2)
    late = defer_receives(add_sends(program, homes(program)), homes(program))
    assert spelt(late)["rank1"] == "1RECVX_F0:0 1F0 1RECVX_F1:0 1F1 1B0 1SENDX_B0:0 1B1 1SENDX_B1:0"
    assert spelt(late)["rank0"].endswith("0RECVX_B0:1 0B0 0RECVX_B1:1 0B1")


def test_the_lower_process_receives_before_it_sends_to_the_same_one() -> None:
    program = Program(lanes=lanes(a="0RECV_B0 1F0 1SEND_F0 0B0", b="1SEND_B0 2RECV_F0 2F0"))
    assert spelt(defer_receives(program, {"a": 0, "b": 1}))["a"] == "1F0 0RECV_B0 1SEND_F0 0B0"
    assert spelt(defer_receives(program, {"a": 1, "b": 0}))["a"] == "1F0 1SEND_F0 0RECV_B0 0B0"


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        ({"a": "1RECV_F0 1F0"}, "1RECV_F0 has no SEND"),
        ({"a": "0F0 0SEND_F0"}, "0SEND_F0 has no 1RECV_F0"),
        ({"a": "0F0 0SEND_F0", "b": "1F0 1RECV_F0"}, "lane b: nothing behind 1RECV_F0 takes what it receives"),
    ],
)
def test_receives_that_cannot_be_deferred(cells: dict[str, str], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        defer_receives(Program(lanes=lanes(**cells)), {"a": 0, "b": 1})


@given(programs())
def test_lowered_programs_are_valid_and_complete(drawn: tuple[Program, dict[str, int]]) -> None:
    program, home = drawn
    check(program)
    for lowered in (add_sends(program, home), defer_receives(add_sends(program, home), home)):
        check(lowered)
        compute = {
            lane: tuple(a for a in actions if OPS[a.op].role not in ("send", "recv"))
            for lane, actions in lowered.lanes.items()
        }
        assert compute == program.lanes
        assert received_before_use(lowered, home)


def received_before_use(lowered: Program, home: dict[str, int]) -> bool:
    """Assert that exactly one earlier message meets every dependency between processes."""
    graph = Graph(lowered)
    node_of = {action: node for node, action in enumerate(graph.actions)}
    assert len(node_of) == len(graph.actions)
    for node, action in enumerate(graph.actions):
        for predecessor in graph.predecessors[node]:
            source = graph.actions[predecessor.node]
            is_message = OPS[source.op].role == "send" or predecessor.edge is None
            if is_message or home[graph.lane_of[predecessor.node]] == home[graph.lane_of[node]]:
                continue
            direction = "F" if source.op == "F" else "B"
            recv = Action(action.stage, f"RECVX_{direction}", source.index, peer=source.stage)
            if graph.lane_of[node_of[recv]] != graph.lane_of[node] or node_of[recv] > node:
                return False
    return True


def test_lane_names_do_not_change_the_order() -> None:
    program = dense("interleaved", 4, 8)
    renamed = dataclasses.replace(program, lanes={f"z{9 - n}": row for n, row in enumerate(program.lanes.values())})
    assert rows(add_sends(program, homes(program))) == rows(add_sends(renamed, homes(renamed)))
