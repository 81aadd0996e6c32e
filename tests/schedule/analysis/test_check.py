from __future__ import annotations

import dataclasses

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import RUNNER_RULES, check, check_loop, in_flight
from bagpipe.schedule.analysis.memory import Memory
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Program, Stage
from tests.schedule.dense import dense
from tests.schedule.tables import lanes


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 3), (4, 8), (8, 8)])
def test_known_schedules_are_valid(name: str, stages: int, micro: int) -> None:
    check(dense(name, stages, micro))


def test_check_detects_deadlocks() -> None:
    edges = (Edge(src="X_INSERT", dst="X_FETCH"), Edge(src="X_FETCH", dst="X_INSERT"))
    with pytest.raises(ScheduleError, match="deadlock: 0X_FETCH0 waits for 0X_INSERT0 waits for 0X_FETCH0"):
        check(Program(lanes=lanes(a="0X_FETCH0", b="0X_INSERT0"), edges=edges))


def test_check_raises_the_first_violation() -> None:
    with pytest.raises(ScheduleError, match=r"^complete: 0X_FETCH1 is missing; expected 0X_FETCH0 to 0X_FETCH2$"):
        check(Program(lanes=lanes(a="0X_FETCH0 0X_FETCH2")))


def test_memory_is_checked_if_known() -> None:
    memory = Memory(activation_bytes={0: 10}, budget_bytes={"rank0": 25})
    check(dense("1f1b", 2, 4), memory=memory)
    with pytest.raises(ScheduleError, match="memory: lane rank0 holds 30 bytes at 0F2, of 25"):
        check(dense("gpipe", 2, 4), memory=memory)


LOOP = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=1)


def with_edges(*edges: Edge) -> Loop:
    return dataclasses.replace(LOOP, edges=(*LOOP.edges, *edges))


BROKEN_LOOPS = {
    "live: .* without any delay": with_edges(Edge(src="OPT", dst="X_FETCH")),
    "source: lane net-in: 0X_FETCH does not depend": dataclasses.replace(LOOP, edges=LOOP.edges[2:]),
    "source: source 0X_PLAN must be performed once": dataclasses.replace(LOOP, source=(0, "X_PLAN")),
    "sink: sink 0X_PUSH_LATE": dataclasses.replace(LOOP, sink=(0, "X_PUSH_LATE")),
    "offsets: 0F of a batch begins before that of the batch before has ended": Loop(
        lanes={"a": (Template(op="X_READ", offset=1), Template(op="F", offset=1), Template(op="F", unit=1))},
        source=(0, "X_READ"),
        sink=(0, "F"),
        stages=(Stage(number=0, micro_per_batch=2),),
    ),
}


@pytest.mark.parametrize(("complaint", "loop"), BROKEN_LOOPS.items(), ids=BROKEN_LOOPS)
def test_each_loop_rule_names_its_violation(complaint: str, loop: Loop) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_loop(loop, RUNNER_RULES)


def test_a_loop_of_one_process_sends_to_others() -> None:
    """A loop belongs to one process: senders and receivers can be in others."""
    templates = (
        Template(op="X_READ"),
        Template(op="RECVX_F", stage=1, peer=0),
        Template(op="F", stage=1),
        Template(op="SENDX_F", stage=1, peer=2),
    )
    check_loop(Loop(lanes={"a": templates}, source=(0, "X_READ"), sink=(1, "F")))


def test_a_lane_that_runs_ahead_of_its_source_is_refused() -> None:
    """X_FETCH of batch b only follows X_READ of batch b - 1: at the end of the data it fetches a missing batch."""
    edges = tuple(
        dataclasses.replace(edge, delay=1) if (edge.src, edge.dst) == ("X_READ", "X_FETCH") else edge
        for edge in LOOP.edges
    )
    with pytest.raises(ScheduleError, match="0X_FETCH does not depend on source"):
        check_loop(dataclasses.replace(LOOP, edges=edges))


@pytest.mark.parametrize(
    ("cells", "peak"), [("0F0 0B0 0F1 0B1", 1), ("0F0 0F1 0B0 0B1", 2), ("0F0 0I0 0F1 0W0 0I1 0W1", 2), ("0F0 0F1", 0)]
)
def test_in_flight(cells: str, peak: int) -> None:
    assert in_flight(lanes(a=cells)["a"]) == peak
