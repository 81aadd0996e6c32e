from __future__ import annotations

import pytest

from bagpipe.schedule.analysis.check import check_loop
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.stage_lanes import lane_templates
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES


def loop_of(name: str, *, ranks: int, process: int = 0) -> Loop:
    num_ranks = DENSE_SCHEDULES[name].num_ranks(4)
    step = step_program(
        chain(4, 8),
        [(0, True), (3, False)],
        name,
        num_processes=num_ranks if ranks > 1 else 1,
        replicas=max(1, ranks // num_ranks),
    )
    return prefetch_loop(prefetch_depth=3, read_ahead=5, write_depth=2, ranks=ranks, step=step, process=process)


def edges_of(loop: Loop, op: str) -> set[str]:
    return {edge.text for edge in loop.edges if op in (edge.src, edge.dst)}


@pytest.mark.parametrize("name", DENSE_SCHEDULES)
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_every_process_has_a_valid_loop(name: str, replicas: int) -> None:
    num_ranks = DENSE_SCHEDULES[name].num_ranks(4)
    for process in range(num_ranks if replicas else 1):
        check_loop(loop_of(name, ranks=replicas * num_ranks or 1, process=process))


def test_rows_enter_and_leave_through_the_source() -> None:
    loop = loop_of("1f1b", ranks=1)
    assert edges_of(loop, "X_EMBED") == {"4X_EMBED(b) <- 0X_INSERT(b)", "0F(b) <- 4X_EMBED(b)", "3F(b) <- 4X_EMBED(b)"}
    assert edges_of(loop, "X_EMBED_GRAD") == {"4X_EMBED_GRAD(b) <- 0I(b)", "0X_UPDATE(b) <- 4X_EMBED_GRAD(b)"}


def test_a_process_without_examples_exchanges_rows_too() -> None:
    loop = loop_of("1f1b", ranks=4, process=2)
    assert loop.lanes["compute2"][0].text == "6X_EMBED"
    assert "6X_EMBED(b) <- 0X_PULL(b)" in edges_of(loop, "X_EMBED")
    assert "0X_PUSH(b) <- 6X_EMBED_GRAD(b)" in edges_of(loop, "X_EMBED_GRAD")
    assert list(loop.lanes) == ["data", "net-in", "copy", "pull", "compute2", "push", "net-out", "ack"]


def test_reading_waits_for_every_lane_that_uses_a_batch() -> None:
    loop = loop_of("1f1b", ranks=1)
    assert edges_of(loop, "X_READ") >= {
        "0X_READ(b) <- 0X_UPDATE(b-5) capacity",
        "0X_READ(b) <- 1OPT(b-5) capacity",
        "0X_READ(b) <- 2OPT(b-5) capacity",
        "0X_READ(b) <- 3OPT(b-5) capacity",
    }


def test_the_parts_of_an_overlap_follow_each_other() -> None:
    ops = [template.op for template in loop_of("dualpipe-v", ranks=1).lanes["compute0"]]
    assert "OVERLAP_F_B" not in ops
    assert ops.count("F") == 16


@pytest.mark.parametrize("name", DENSE_SCHEDULES)
def test_receives_come_ahead_and_keep_their_order(name: str) -> None:
    num_ranks = DENSE_SCHEDULES[name].num_ranks(4)
    step = step_program(chain(4, 8), [(0, True), (3, False)], name, num_processes=num_ranks)
    for process in range(num_ranks):
        for lane in step.lanes_of(process):
            texts = [f"{t.text}#{t.unit}" for t in lane_templates(step, lane)]
            flat = [Template(op=a.op, stage=a.stage, unit=a.index or 0, peer=a.peer) for a in _atoms(step, lane)]
            given = [f"{t.text}#{t.unit}" for t in flat]
            received = [text for text in given if "RECV" in text]
            assert [text for text in texts if "RECV" in text] == received
            assert [text for text in texts if "RECV" not in text] == [text for text in given if "RECV" not in text]
            assert all(texts.index(text) <= given.index(text) for text in received)


def _atoms(step: StepProgram, lane: str) -> list[Action]:
    return [atom for action in step.program.lanes[lane] for atom in action.atoms]
