"""Lanes that choose their order: limits and dependencies hold whatever the timing, and an order can be repeated."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.pipeline.compile import compile_loop
from bagpipe.pipeline.lane import EndOfBatches
from bagpipe.pipeline.runner import Runner
from bagpipe.schedule.analysis.check import check, check_loop, in_flight
from bagpipe.schedule.builders.dynamic import limits
from bagpipe.schedule.builders.prefetch_loop import declare_reading, declare_stages
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.stage_graph import StageGraph, chain, dense_program
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import dense_schedule
from tests.pipeline.loops import Gates

Orders = dict[tuple[str, int], tuple[int, ...]]


class Notes:
    """Orders of one lane."""

    def __init__(self, lane: str, orders: Orders, given: Orders | None) -> None:
        self._lane = lane
        self._orders = orders
        self._given = given

    def given(self, batch: int) -> Sequence[int] | None:
        return None if self._given is None else self._given.get((self._lane, batch))

    def taken(self, batch: int, tracks: Sequence[int]) -> None:
        self._orders[self._lane, batch] = tuple(tracks)


def loop_of(graph: StageGraph, most: int) -> Loop:
    """All stages in one process, and a lane that reads."""
    step = step_program(graph, [(0, True)], dense_schedule("dynamic").configured({"in_flight": most}))
    builder = LoopBuilder(read_ahead=2)
    declare_reading(builder)
    builder.provide(Point.ROWS_READY, "X_READ")
    declare_stages(builder, step, 0)
    return builder.build().loop


def run(graph: StageGraph, most: int, seed: int, batches: int, given: Orders | None = None) -> Orders:
    """Run with random delays; checks the dependencies of every action, and the limits."""
    loop, gates, lock = loop_of(graph, most), Gates(seed), threading.Lock()
    done: set[tuple[int, str, int]] = set()
    orders: Orders = {}
    most_of = limits(graph, most)

    def handler(stage: int, op: str, index: int) -> None:
        if op == "X_READ" and index == batches:
            raise EndOfBatches
        if op in ("F", "B"):
            sources = graph.producers[stage] if op == "F" else graph.consumers[stage]
            with lock:
                assert all((source, op, index) in done for source in sources), f"{stage}{op}{index}"
                assert op == "F" or (stage, "F", index) in done
                assert index == sum(s == stage and o == op for s, o, _ in done), "in the order of micro-batches"
                live = sum((s == stage) * ((o == "F") - (o == "B")) for s, o, _ in done)
                assert op == "B" or live < most_of[stage]
        gates.pass_through(f"{stage}{op}{index}")
        with lock:
            done.add((stage, op, index))

    keys = {template.key for _, template in loop.templates}
    handlers = {f"{s}{op}": lambda index, s=s, op=op: handler(s, op, index) for s, op in keys}
    notes = {lane: Notes(lane, orders, given) for lane in loop.in_flight}
    with gates.referee():
        Runner(loop, handlers, orders=notes).run()
    assert len(done) == batches * len(loop.templates)
    return orders


def rows_of(graph: StageGraph, orders: Orders, batch: int) -> list[list[Action]]:
    rows = []
    for stage in range(graph.num_stages):
        counts, row = [0, 0], []
        for track in orders[f"compute{stage}", batch]:
            row.append(Action(stage, "BF"[track], counts[track]))
            counts[track] += 1
        rows.append(row)
    return rows


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 6), st.integers(0, 10**6), st.data())
def test_any_timing_gives_a_valid_order_that_can_be_repeated(
    stages: int, micro: int, most: int, seed: int, data: st.DataObject
) -> None:
    edges = chain(stages, micro).edges
    if skips := [(a, b) for b in range(stages) for a in range(b - 1)]:
        edges = (*edges, *data.draw(st.lists(st.sampled_from(skips), unique=True)))
    graph = StageGraph(micro_per_batch=(micro,) * stages, edges=tuple(sorted(edges)))
    orders = run(graph, most, seed, 2)
    assert len(orders) == 2 * stages
    for batch in range(2):
        program = dense_program(graph, rows_of(graph, orders, batch))
        check(program)
        assert all(in_flight(row) <= m for row, m in zip(program.lanes.values(), limits(graph, most), strict=True))
    assert run(graph, most, seed + 1, 2, given=orders) == orders


def test_the_first_step_of_a_unit_has_all_its_requirements() -> None:
    loop = loop_of(chain(2, 3), 2)
    compiled = compile_loop(loop, dict.fromkeys({t.op for _, t in loop.templates}, lambda index: None), {})
    plan = next(lane for lane in compiled.lanes if lane.resource.name == "compute0")
    names = compiled.op_names
    needs = [
        [f"{unit[0].text}{unit[0].unit}", *sorted(f"{names[r.op]}#{r.position}" for r in unit[0].requirements)]
        for track in plan.tracks
        for unit in track
    ]
    assert needs == [
        ["0B0", "0F#1", "1B#1"], ["0B1", "0F#2", "1B#2"], ["0B2", "0F#3", "1B#3"],
        ["0F0"], ["0F1"], ["0F2", "0B#1"],
    ]  # fmt: skip
    assert [step.text for step in plan.steps[: plan.first_free]] == ["2X_EMBED"]
    assert [step.text for step in plan.steps[plan.end_free :]] == ["2X_EMBED_GRAD", "0OPT"]


@pytest.mark.parametrize(
    ("tracks", "most", "complaint"),
    [
        ((0, None, 1), 1, "an action between those of tracks is in none"),
        ((0, 0, 0), 0, "3 actions in tracks and at most 0 in flight"),
        ((None, None, None), 1, "0 actions in tracks and at most 1 in flight"),
    ],
)
def test_tracks_lie_next_to_each_other(tracks: tuple[int | None, ...], most: int, complaint: str) -> None:
    own = tuple(Template(op=op, track=track) for op, track in zip(("F", "B", "OPT"), tracks, strict=True))
    loop = Loop(
        lanes={"a": (Template(op="X_READ"), *own)}, source=(0, "X_READ"), sink=(0, "OPT"), in_flight={"a": most}
    )
    with pytest.raises(ScheduleError, match=complaint):
        check_loop(loop)
