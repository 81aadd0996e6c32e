from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.periodic import periodic, repeated
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Program
from tests.schedule.period import period
from tests.schedule.second_order import Case, cases, plain
from tests.schedule.tables import lanes


def loop_of(program: Program) -> Loop:
    """The program of one batch as a loop, without overlaps."""
    rows = {
        lane: tuple(Template(op=atom.op, stage=atom.stage, unit=atom.index or 0) for a in actions for atom in a.atoms)
        for lane, actions in program.lanes.items()
    }
    first = next(iter(rows.values()))[0].key
    return Loop(lanes=rows, edges=program.edges, stages=program.stages, source=first, sink=first)


@settings(max_examples=20)
@given(
    name=st.sampled_from(["1f1b", "gpipe", "chimera", "zb-h1", "interleaved"]),
    costs=st.fixed_dictionaries({op: st.integers(0, 5) for op in ("F", "B", "I", "W", "REC", "OPT")}),
)
def test_the_period_is_the_greatest_cycle_ratio(name: str, costs: dict[str, int]) -> None:
    program, _ = plain(name, 4, 4, processes=False)
    found = periodic(program, costs).period
    assert found == pytest.approx(float(period(loop_of(program), lambda template: costs.get(template.op, 0)).value))


@given(cases(), st.sampled_from([0, 0.5]))
def test_all_dependencies_hold_in_every_batch(case: Case, latency: float) -> None:
    timing = periodic(case.program, case.costs, latency=latency)
    for node, waits in enumerate(timing.waits):
        for wait in waits:
            earliest = timing.starts[wait.node] + wait.time - wait.batches * timing.period
            assert timing.starts[node] >= earliest - timing.slack
    assert min(timing.starts) == 0


def test_two_batches_overlap_where_lanes_wait() -> None:
    program, _ = plain("1f1b", 4, 4)
    timing = periodic(program)
    assert timing.period == 22
    starts = {action.text: start for action, start in zip(timing.actions, timing.starts, strict=True)}
    assert (starts["0F0"], starts["3F0"], starts["0OPT0"]) == (0, 3, 21)
    two = {timed.action.text: timed.start for timed in simulate(repeated(program, 2)).timed}
    assert two["3F4"] == starts["3F0"] + timing.period


def test_a_cycle_over_several_lanes_sets_the_period() -> None:
    edges = (Edge(src="F", dst="F", dst_stage=1), Edge(src="F", src_stage=1, dst="F", delay=1))
    program = Program(lanes=lanes(a="0F0", b="1F0"), edges=edges)
    assert periodic(program, {"0F": 2, "1F": 3}).period == 5
    assert periodic(program, {"0F": 2, "1F": 3}, latency=1).period == 7
    assert periodic(program, {"0F": 2, "1F": 3}, latency=lambda src, dst: dst.stage).period == 6


def test_a_batch_is_repeated_with_higher_indices() -> None:
    program, _ = plain("1f1b", 2, 2)
    assert " ".join(a.text for a in repeated(program, 2).lanes["rank1"]) == (
        "1F0 1B0 1F1 1B1 1OPT0 1F2 1B2 1F3 1B3 1OPT1"
    )
    assert repeated(plain("dualpipe-v", 4, 4)[0], 3).num_batches() == 3


def test_programs_without_a_period_are_refused() -> None:
    edges = (Edge(src="F", dst="F", dst_stage=1), Edge(src="F", src_stage=1, dst="F"))
    with pytest.raises(ScheduleError, match="deadlock: 0F0 waits for 1F0 waits for 0F0"):
        periodic(Program(lanes=lanes(a="0F0", b="1F0"), edges=edges))
    with pytest.raises(ScheduleError, match="more than a number can hold"):
        periodic(Program(lanes=lanes(a="0F0 1F0")), {"F": 1e308})
