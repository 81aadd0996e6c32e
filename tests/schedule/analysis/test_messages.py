"""Messages of valid programs. Invalid ones are in test_rules."""

from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.messages import misplaced_messages, unmatched_pairs, unmatched_tags
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.lowering.sends import add_sends
from tests.schedule.dense import dense
from tests.schedule.tables import lanes


def test_tags_allow_edges_to_overtake_each_other() -> None:
    program = Program(lanes=lanes(a="0F0 2F0 0SENDX_F0:1 2SENDX_F0:1", b="1RECVX_F0:2 1RECVX_F0:0 1F0"))
    with pytest.raises(ScheduleError, match="pairs: lane a sends for 1RECVX_F0:0 when lane b expects 1RECVX_F0:2"):
        check(program)
    check(program, tagged=True)
    assert len(list(unmatched_pairs(program))) == 1
    assert not [*unmatched_tags(program), *misplaced_messages(program)]


def test_a_stage_may_send_the_same_micro_batch_to_several() -> None:
    check(Program(lanes=lanes(a="0F0 0SENDX_F0:1 0SENDX_F0:2", b="1RECVX_F0:0 1F0", c="2RECVX_F0:0 2F0")))


def test_a_stage_may_be_on_two_lanes_in_two_pipes() -> None:
    program = dense("chimera", 4, 8)
    check(add_sends(program, {lane: rank for rank, lane in enumerate(program.lanes)}))
