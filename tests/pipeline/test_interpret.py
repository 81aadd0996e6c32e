from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.pipeline.interpret import find_handler, interpret
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.program import Edge, Program


def test_actions_run_in_an_order_the_edges_allow() -> None:
    lanes = {"a": (parse("0F0"), parse("0UNSHARD")), "b": (parse("(1F0;1B0)OVERLAP_F_B"),)}
    done: list[str] = []
    interpret(
        Program(lanes=lanes, edges=(Edge(src="F", dst="F", src_stage=0, dst_stage=1),)),
        {
            "0F": lambda index: done.append(f"0F{index}"),
            "F": lambda index: done.append(f"F{index}"),
            "B": lambda index: done.append(f"B{index}"),
            "UNSHARD": lambda index: done.append(f"UNSHARD{index}"),
        },
    )
    assert sorted(done) == ["0F0", "B0", "F0", "UNSHARD-1"]
    assert done.index("0F0") < done.index("F0") < done.index("B0")


def test_a_missing_handler_is_named() -> None:
    with pytest.raises(ScheduleError, match="no handler for 1F; handlers given: 0F"):
        find_handler({"0F": lambda index: None}, "1F", "F")
