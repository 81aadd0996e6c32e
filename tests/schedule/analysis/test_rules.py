from __future__ import annotations

import pytest

from bagpipe.schedule.analysis.check import check, problems
from bagpipe.schedule.analysis.rules import RULES
from bagpipe.schedule.ir.program import Edge, Program, Stage
from tests.schedule.tables import lanes

BROKEN = {
    "edges: ": Program(lanes=lanes(a="0F0"), edges=(Edge(src="X_INSERT", dst="F"),)),
    "complete: 0X_FETCH1 appears 2 times": Program(lanes=lanes(a="0X_FETCH0 0X_FETCH1 0X_FETCH1")),
    "complete: 0X_FETCH1 is missing": Program(lanes=lanes(a="0X_FETCH0 0X_FETCH2")),
    "complete: 0X_INSERT1 is missing": Program(lanes=lanes(a="0X_FETCH0 0X_FETCH1", b="0X_INSERT0")),
    "complete: stage 0: micro-batch 1 must have": Program(lanes=lanes(a="0F0 0F1 0B0")),
    "complete: stage 0: micro-batch 0 has both B and I": Program(lanes=lanes(a="0F0 0B0 0I0 0W0")),
    "complete: stage 0: micro-batch 1 must have F and none or both": Program(
        lanes=lanes(a="0F0 0F1 0I1"), stages=(Stage(number=0, micro_per_batch=2),), semantics="partial"
    ),
    "gradients-arrive: stage 0: the backward of micro-batch 1 needs that of 1 in stage 1": Program(
        lanes=lanes(a="0F0 0F1 1F0 1F1 1B0 0B0 0B1"),
        edges=(Edge(src="I", src_stage=1, dst="I", dst_stage=0),),
        stages=(Stage(number=0, micro_per_batch=2), Stage(number=1, micro_per_batch=2)),
        semantics="partial",
    ),
    "order: lane a: 0B0 comes before 0F0": Program(lanes=lanes(a="0B0 0F0")),
    "order: lane a: 0W0 comes before 0I0": Program(lanes=lanes(a="0F0 0W0 0I0")),
    "one-lane: 0F is on two lanes, a and b": Program(lanes=lanes(a="0F0", b="0F1")),
    "one-lane: 0B is on lane b, 0F on a": Program(lanes=lanes(a="0F0", b="0B0")),
    "pairs: 0SEND_F0 has no 1RECV_F0": Program(lanes=lanes(a="0F0 0SEND_F0")),
    "pairs: 1RECV_F0 has no SEND": Program(lanes=lanes(b="1RECV_F0 1F0")),
    "pairs: lane a sends for 1RECV_F0 when lane b expects 1RECV_F1": Program(
        lanes=lanes(a="0SEND_F0 0SEND_F1", b="1RECV_F1 1RECV_F0")
    ),
    "tags: lane a sends for 1RECVX_F0:0 when lane b expects 1RECVX_F1:0": Program(
        lanes=lanes(a="0SENDX_F0:1 0SENDX_F1:1", b="1RECVX_F1:0 1RECVX_F0:0")
    ),
    "messages: lane a: 0SEND_F0 comes before 0F0": Program(lanes=lanes(a="0SEND_F0 0F0", b="1RECV_F0 1F0")),
    "messages: lane b: 1RECV_F0 comes after 1F0": Program(lanes=lanes(a="0F0 0SEND_F0", b="1F0 1RECV_F0")),
    "messages: lane b: 2RECVX_B1:1 comes after 2X_EMBED_GRAD0": Program(
        lanes=lanes(a="1F0 1F1 1B0 1SENDX_B0:2 1B1 1SENDX_B1:2", b="2RECVX_B0:1 2X_EMBED_GRAD0 2RECVX_B1:1"),
        stages=(Stage(number=1, micro_per_batch=2),),
    ),
    "messages: lane c: 0SEND_F0 is apart from what makes it: 0F0 is on a": Program(
        lanes=lanes(a="0F0", b="1RECV_F0 1F0", c="0SEND_F0")
    ),
    "messages: lane c: 1RECV_F0 is apart from what takes it: 1F0 is on b": Program(
        lanes=lanes(a="0F0 0SEND_F0", b="1F0", c="1RECV_F0")
    ),
    "messages: 0SEND_F0 has nothing that makes its value": Program(lanes=lanes(a="0SEND_F0", b="1RECV_F0 1F0")),
    "messages: 1RECV_F0 has nothing that takes its value": Program(lanes=lanes(a="0F0 0SEND_F0", b="1RECV_F0")),
    "versions: 0F1@0 uses version 0; in a sync program batch 1": Program(lanes=lanes(a="0F0@0 0F1@0")),
    "row-hazards: X_FETCH must wait for X_WRITEBACK": Program(lanes=lanes(a="0X_FETCH0", b="0X_WRITEBACK0")),
    "row-hazards: X_EVICT must wait for X_UPDATE": Program(lanes=lanes(a="0X_EVICT0", b="0X_UPDATE0")),
    "gradients: 0OPT0 comes before 0B1 of the same batch": Program(
        lanes=lanes(a="0F0 0B0 0F1 0OPT0 0B1"), stages=(Stage(number=0, micro_per_batch=2),)
    ),
    "gradients: 0OPT0 does not wait for 0B0 of the same batch": Program(
        lanes=lanes(a="0F0 0B0", b="0REDUCE_GRAD0", c="0OPT0"), edges=(Edge(src="REDUCE_GRAD", dst="OPT"),)
    ),
    "gradients: 0PRECOND0 comes before 0B1 of the same batch": Program(
        lanes=lanes(a="0F0 0B0 0F1 0PRECOND0 0B1"), stages=(Stage(number=0, micro_per_batch=2),)
    ),
    "order: lane a: 0COV_A0 comes before 0F0": Program(lanes=lanes(a="0COV_A0 0F0")),
    "order: lane a: 0COV_A0 comes before 0REC0": Program(lanes=lanes(a="0F0 0COV_A0 0REC0 0B0")),
    "order: lane a: 0COV_G0 comes before 0W0": Program(lanes=lanes(a="0F0 0I0 0COV_G0 0W0")),
    "one-lane: 0COV_A is on lane b, 0F on a": Program(lanes=lanes(a="0F0", b="0COV_A0")),
    "complete: 0X_INV1 is missing; expected 0X_INV0 to 0X_INV1": Program(
        lanes=lanes(a="0X_INV0"), stages=(Stage(number=0, layers=2),)
    ),
    "factors: no X_INV waits for 0COV_G": Program(
        lanes=lanes(a="0F0 0B0 0COV_A0 0COV_G0 0X_INV0 0PRECOND0"), edges=(Edge(src="COV_A", dst="X_INV"),)
    ),
    "whole-parameters: 0F0 waits for no UNSHARD": Program(lanes=lanes(a="0F0", b="0UNSHARD0 0RESHARD0")),
}


@pytest.mark.parametrize(("complaint", "program"), BROKEN.items(), ids=BROKEN)
def test_each_rule_names_its_violation(complaint: str, program: Program) -> None:
    assert any(problem.startswith(complaint) for problem in problems(program)), problems(program)


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in RULES} == {complaint.partition(":")[0] for complaint in BROKEN}


def test_versions_are_free_where_semantics_say_so() -> None:
    program = Program(lanes=lanes(a="0F0@0 0F1@0"), semantics="delay")
    check(program)


def test_micro_batches_may_take_either_form_of_backward() -> None:
    check(Program(lanes=lanes(a="0F0 0F1 0B0 0I1 0W1"), stages=(Stage(number=0, micro_per_batch=2),)))


def test_an_optimizer_may_wait_through_a_reduction_elsewhere() -> None:
    edges = (Edge(src="W", dst="REDUCE_GRAD"), Edge(src="REDUCE_GRAD", dst="OPT"))
    check(Program(lanes=lanes(a="0F0 0B0", b="0REDUCE_GRAD0", c="0OPT0"), edges=edges))


def test_rows_are_updated_after_all_stages_gradients() -> None:
    """The rule covers all stages: a stage 0 on another lane is part of the model."""
    row = lanes(a="3X_EMBED0 3X_EMBED_GRAD0", b="0F0 0B0", c="0X_PUSH0 0X_UPDATE0")
    push = Edge(src="X_EMBED_GRAD", src_stage=3, dst="X_PUSH")
    check(Program(lanes=row, edges=(push, Edge(src="X_PUSH", dst="X_UPDATE"))))
    assert problems(Program(lanes=row, edges=(Edge(src="X_PUSH", dst="X_UPDATE"),))) == [
        "gradients: 0X_UPDATE0 does not wait for 3X_EMBED_GRAD0 of the same batch"
    ]
