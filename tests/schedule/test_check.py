from __future__ import annotations

import dataclasses

import pytest

from bagpipe.schedule.actions import Action, parse
from bagpipe.schedule.check import RULES, check, check_loop, in_flight, problems
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.loop import Loop, Template
from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.program import Edge, Program, Stage
from tests.schedule.dense import chain, gpipe, one_f_one_b


def lanes(**cells: str) -> dict[str, tuple[Action, ...]]:
    return {lane: tuple(parse(cell) for cell in text.split()) for lane, text in cells.items()}


BROKEN = {
    "edges: ": Program(lanes=lanes(a="0F0"), edges=(Edge(src="X_PUT", dst="F"),)),
    "complete: 0X_GET1 appears 2 times": Program(lanes=lanes(a="0X_GET0 0X_GET1 0X_GET1")),
    "complete: 0X_GET1 is missing": Program(lanes=lanes(a="0X_GET0 0X_GET2")),
    "complete: 0X_PUT1 is missing": Program(lanes=lanes(a="0X_GET0 0X_GET1", b="0X_PUT0")),
    "complete: stage 0: micro-batch 1 must have": Program(lanes=lanes(a="0F0 0F1 0B0")),
    "complete: stage 0: micro-batch 0 has both B and I": Program(lanes=lanes(a="0F0 0B0 0I0 0W0")),
    "order: lane a: 0B0 comes before 0F0": Program(lanes=lanes(a="0B0 0F0")),
    "order: lane a: 0W0 comes before 0I0": Program(lanes=lanes(a="0F0 0W0 0I0")),
    "one-lane: 0F is on two lanes, a and b": Program(lanes=lanes(a="0F0", b="0F1")),
    "pairs: 0SEND_F0 has no 1RECV_F0": Program(lanes=lanes(a="0F0 0SEND_F0")),
    "pairs: 1RECV_F0 has no SEND": Program(lanes=lanes(b="1RECV_F0 1F0")),
    "pairs: lane a sends for 1RECV_F0 when lane b expects 1RECV_F1": Program(
        lanes=lanes(a="0SEND_F0 0SEND_F1", b="1RECV_F1 1RECV_F0")
    ),
    "versions: 0F1@0 uses version 0; in a sync program batch 1": Program(lanes=lanes(a="0F0@0 0F1@0")),
    "row-hazards: X_GET must wait for X_STORE": Program(lanes=lanes(a="0X_GET0", b="0X_STORE0")),
    "row-hazards: X_EVICT must wait for X_UPDATE": Program(lanes=lanes(a="0X_EVICT0", b="0X_UPDATE0")),
    "gradients: 0OPT0 comes before 0B1 of the same batch": Program(
        lanes=lanes(a="0F0 0B0 0F1 0OPT0 0B1"), stages=(Stage(number=0, micro_per_batch=2),)
    ),
}


@pytest.mark.parametrize(("complaint", "program"), BROKEN.items(), ids=BROKEN)
def test_each_rule_names_what_is_wrong(complaint: str, program: Program) -> None:
    assert any(problem.startswith(complaint) for problem in problems(program)), problems(program)
    with pytest.raises(ScheduleError):
        check(program)


def test_every_rule_is_broken_by_some_test() -> None:
    assert {rule.name for rule in RULES} == {complaint.partition(":")[0] for complaint in BROKEN}


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 3), (4, 8), (8, 8)])
def test_known_schedules_are_valid(order: object, stages: int, micro: int) -> None:
    check(chain(stages, micro, order))  # type: ignore[arg-type]


def test_versions_are_free_where_semantics_say_so() -> None:
    program = Program(lanes=lanes(a="0F0@0 0F1@0"), semantics="delay")
    check(program)


def test_micro_batches_may_take_either_form_of_backward() -> None:
    check(Program(lanes=lanes(a="0F0 0F1 0B0 0I1 0W1"), stages=(Stage(number=0, micro_per_batch=2),)))


def test_no_deadlock_is_part_of_check() -> None:
    edges = (Edge(src="X_PUT", dst="X_GET"), Edge(src="X_GET", dst="X_PUT"))
    with pytest.raises(ScheduleError, match="deadlock: 0X_GET0 waits for 0X_PUT0 waits for 0X_GET0"):
        check(Program(lanes=lanes(a="0X_GET0", b="0X_PUT0"), edges=edges))


LOOP = prefetch(prefetch_depth=2, read_ahead=4, write_depth=1)


def with_edges(*edges: Edge) -> Loop:
    return dataclasses.replace(LOOP, edges=(*LOOP.edges, *edges))


BROKEN_LOOPS = {
    "live: .* without any delay": with_edges(Edge(src="OPT", dst="X_GET")),
    "source: lane net-in: 0X_GET does not depend": dataclasses.replace(LOOP, edges=LOOP.edges[2:]),
    "source: source 0X_LOOK must be performed once": dataclasses.replace(LOOP, source=(0, "X_LOOK")),
    "sink: sink 0X_PUSH_LATE": dataclasses.replace(LOOP, sink=(0, "X_PUSH_LATE")),
    "offsets: 0F has different offsets": Loop(
        lanes={"a": (Template(op="X_READ", offset=1), Template(op="F"), Template(op="F", unit=1, offset=1))},
        source=(0, "X_READ"),
        sink=(0, "F"),
        stages=(Stage(number=0, micro_per_batch=2),),
    ),
}


@pytest.mark.parametrize(("complaint", "loop"), BROKEN_LOOPS.items(), ids=BROKEN_LOOPS)
def test_each_loop_rule_names_what_is_wrong(complaint: str, loop: Loop) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_loop(loop)


def test_a_lane_that_runs_ahead_of_its_source_is_refused() -> None:
    """X_GET of batch b only after X_READ of batch b - 1: at the end of the data it would fetch a batch that is not."""
    edges = tuple(
        dataclasses.replace(edge, delay=1) if (edge.src, edge.dst) == ("X_READ", "X_GET") else edge
        for edge in LOOP.edges
    )
    with pytest.raises(ScheduleError, match="0X_GET does not depend on source"):
        check_loop(dataclasses.replace(LOOP, edges=edges))


@pytest.mark.parametrize(
    ("cells", "peak"), [("0F0 0B0 0F1 0B1", 1), ("0F0 0F1 0B0 0B1", 2), ("0F0 0I0 0F1 0W0 0I1 0W1", 2), ("0F0 0F1", 0)]
)
def test_in_flight(cells: str, peak: int) -> None:
    assert in_flight(lanes(a=cells)["a"]) == peak
