from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.lowering.replicas import replicate_stages
from bagpipe.schedule.lowering.step_program import step_program
from tests.schedule.dense import dense


def test_each_part_has_a_lane_and_meets_those_with_common_examples() -> None:
    program = replicate_stages(dense("1f1b", 3, 2), (2, 2, 1))
    assert {lane: actions[0].text for lane, actions in program.lanes.items()} == {
        "compute0": "0F0",
        "compute1": "3F0",
        "compute2": "1F0",
        "compute3": "4F0",
        "compute4": "2F0",
    }
    forward = {(edge.src_stage, edge.dst_stage) for edge in program.edges if edge.src == edge.dst == "F"}
    assert forward == {(0, 1), (3, 4), (1, 2), (4, 2)}, "halves meet halves only, and both the whole"
    assert [(stage.number, stage.parameters, stage.part, stage.parts) for stage in program.stages] == [
        (0, 0, 0, 2),
        (3, 0, 1, 2),
        (1, 1, 0, 2),
        (4, 1, 1, 2),
        (2, 2, 0, 1),
    ]
    check(program)


def test_parts_of_other_micro_batches_can_meet() -> None:
    graph = StageGraph(micro_per_batch=(2, 1), edges=((0, 1),))
    step = step_program(graph, ((0, True), (1, False)), "graph", stage_replicas=(2, 2), num_processes=4)
    forward = {(e.src_stage, e.dst_stage) for e in step.program.edges if e.src == e.dst == "F"}
    assert forward == {(0, 1), (0, 3), (2, 1), (2, 3)}
    assert step.has_parts
    assert [(i.number, i.stage, i.part, i.parts, i.process) for i in step.instances] == [
        (0, 0, 0, 2, 0),
        (1, 1, 0, 2, 2),
        (2, 0, 1, 2, 1),
        (3, 1, 1, 2, 3),
    ]
    assert [embedding.pipes for embedding in step.embedding_stages] == [(0,), (), (), ()]
    sent = [atom.text for atom in step.program.atoms() if atom.op == "SENDX_F" and atom.stage == 0]
    assert sent == ["0SENDX_F0:1", "0SENDX_F0:3", "0SENDX_F1:1", "0SENDX_F1:3"]


def test_refused() -> None:
    with pytest.raises(ScheduleError, match=r"expected 2 numbers of replicas, one of at least 1 per stage, got \[2\]"):
        replicate_stages(dense("1f1b", 2, 2), (2,))
    with pytest.raises(ScheduleError, match="stages with replicas of their own need one stage per rank, got rank0"):
        replicate_stages(dense("zb-v", 4, 4), (2,) * 8)
    with pytest.raises(ScheduleError, match="chimera: replicas of single stages need a schedule of one direction"):
        step_program(chain(2, 2), ((0, True),), "chimera", stage_replicas=(2, 1), num_processes=3)


def test_parts_choose_their_order_within_the_limit_of_their_stage() -> None:
    step = step_program(chain(3, 4), ((0, True), (2, False)), "dynamic", stage_replicas=(2, 1, 2), num_processes=5)
    assert step.in_flight == {"compute0": 3, "compute1": 3, "compute2": 2, "compute3": 1, "compute4": 1}
    assert step.receiving_lanes_of(2) == ("recv10", "recv11", "recv13", "recv14")
    check(step.program)
