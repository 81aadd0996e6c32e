from __future__ import annotations

from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.lowering.receives import receive_lane
from bagpipe.schedule.lowering.step_program import step_program


def test_receives_have_a_lane_per_pair_of_processes() -> None:
    step = step_program(chain(2, 2), [(0, True), (1, True)], "dynamic", num_processes=2)
    lanes = {lane: " ".join(a.text for a in row) for lane, row in step.program.lanes.items() if "recv" in lane}
    assert lanes == {
        "recv1": "0RECVX_B0:1 2RECVX_B0:1 0RECVX_B1:1 2RECVX_B1:1",
        "recv2": "1RECVX_F0:2 1RECVX_F1:2 1RECVX_F0:0 1RECVX_F1:0",
    }
    assert step.receiving_lanes_of(0) == ("recv1",)
    assert step.receiving_lanes_of(1) == (receive_lane(1, 0, 2),)
    assert step.in_flight == {"compute0": 2, "compute1": 1}
    edges = {edge.text for edge in step.program.edges}
    assert {"1F(b) <- 1RECVX_F(b)", "1RECVX_F(b) <- 3X_EMBED(b)", "2X_EMBED_GRAD(b) <- 2RECVX_B(b)"} <= edges
    assert not any(OPS[a.op].role == "recv" for lane in ("compute0", "compute1") for a in step.program.lanes[lane])


def test_several_senders_of_a_stage() -> None:
    graph = StageGraph(micro_per_batch=(4,) * 4, edges=((0, 2), (1, 2), (2, 3), (0, 3)))
    step = step_program(graph, [(0, True), (1, True), (3, False)], "dynamic", num_processes=4, replicas=2)
    check(step.program)
    assert step.receiving_lanes_of(3) == ("recv12", "recv14")
    assert step.receiving_lanes_of(1) == ("recv4", "recv6")
