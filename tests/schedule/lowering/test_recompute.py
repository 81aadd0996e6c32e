"""Shares of recomputed micro-batches: by Merak's formula where it holds, and within limits everywhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.memory import Memory
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.shifted import recompute_shares
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.lowering.recompute import add_recompute, least_limit, shares_of_text, shares_within
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.dense import dense, rows


def kept(program: Program, memory: Memory, shares: dict[int, float]) -> list[float]:
    """Peak bytes per lane of the checked program."""
    recomputed = add_recompute(program, shares)
    check(recomputed)
    return [use.peak_bytes for use in simulate(recomputed, memory=memory).lanes.values()]


def ones(program: Program) -> Memory:
    return Memory(activation_bytes={stage.number: 1 for stage in program.stages})


def test_recomputation_comes_right_before_its_backward() -> None:
    program = add_recompute(dense("dualpipe-v", 2, 4), {0: 1.0, 3: 1.0})
    assert "3REC1,(0F3;3B1)OVERLAP_F_B,0REC0,(3F2;0B0)OVERLAP_F_B" in rows(program)[0]
    assert "REC" not in rows(program)[1]
    check(program)


def test_what_recomputes_already_does_not_recompute_twice() -> None:
    program = add_recompute(dense("1f1b-shifted", 3, 4), dict.fromkeys(range(3), 1.0))
    assert all(row.count("REC") == 4 for row in rows(program))
    check(program)


def test_a_share_is_spread_evenly() -> None:
    program = add_recompute(dense("gpipe", 2, 6), {0: 0.5, 1: 1 / 3})
    assert [row.partition("B0")[2] for row in rows(program)] == [
        ",0REC1,0B1,0B2,0REC3,0B3,0B4,0REC5,0B5",
        ",1B1,1REC2,1B2,1B3,1B4,1REC5,1B5",
    ]


@settings(max_examples=40)
@given(ranks=st.integers(2, 8), per_rank=st.integers(1, 6), kept_ahead=st.integers(0, 7))
def test_of_1f1b_they_are_meraks_in_whole_micro_batches(ranks: int, per_rank: int, kept_ahead: int) -> None:
    """Of S - 1 - i micro-batches in flight besides the current one, the first stage keeps so many, and all others."""
    assume(kept_ahead < ranks)
    micro = per_rank * ranks
    program = dense("1f1b", ranks, micro)
    published = recompute_shares(1 - kept_ahead / (ranks - 1), ranks)
    found = shares_within(program, ones(program), kept_ahead + 1)
    for stage, share in enumerate(published):
        assert found[stage] <= math.ceil(share * micro - 1e-9) / micro
        assert found[stage] * micro > share * micro - (ranks - stage), "fewer only while the row ends"
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert max(kept(program, ones(program), dict(enumerate(published)))) <= kept_ahead + 1


@given(
    name=st.sampled_from([name for name in DENSE_SCHEDULES if name not in ("zb-auto", "1f1b-shifted")]),
    sizes=st.tuples(*[st.integers(1, 30)] * 8),
    inputs=st.integers(0, 30),
    slack=st.floats(0, 1),
)
def test_no_lane_keeps_more_than_the_limit_and_one_recomputed_less_would(
    name: str, sizes: tuple[int, ...], inputs: int, slack: float
) -> None:
    program = dense(name, 4, 8)
    stages = [stage.number for stage in program.stages]
    memory = Memory(
        activation_bytes={stage: sizes[stage % 8] for stage in stages},
        input_bytes={stage: min(inputs, sizes[stage % 8]) for stage in stages},
    )
    least = max(kept(program, memory, dict.fromkeys(stages, 1.0)))
    most = max(kept(program, memory, {}))
    limit = least + slack * (most - least)
    found = shares_within(program, memory, limit)
    assert max(kept(program, memory, found)) <= limit
    for stage, share in found.items():
        together = [other for other in stages if _share_a_lane(program, stage, other)]
        assert all(found[other] == share for other in together)
        if share:
            count = len({atom.index for atom in program.atoms() if atom.stage == stage})
            less = {**found, **dict.fromkeys(together, share - 1 / count)}
            assert max(kept(program, memory, less)) > limit
    with pytest.raises(ScheduleError, match="even if it recomputes all micro-batches, got a limit of"):
        shares_within(program, memory, least - 0.5)


def _share_a_lane(program: Program, stage: int, other: int) -> bool:
    """Directly, or through other stages."""
    found = {stage}
    while True:
        more = {
            atom.stage
            for actions in program.lanes.values()
            if found & {a.stage for action in actions for a in action.atoms}
            for action in actions
            for atom in action.atoms
        }
        if more <= found:
            return other in found
        found |= more


def test_auto_is_what_the_last_stage_needs() -> None:
    program = dense("1f1b", 4, 8)
    memory = Memory(activation_bytes=dict.fromkeys(range(4), 10), input_bytes=dict.fromkeys(range(4), 0))
    assert least_limit(program, memory) == 10
    assert shares_of_text("auto", program) == shares_of_text("auto", program, memory) == {0: 1, 1: 1, 2: 1, 3: 0}
    assert shares_of_text("auto", program, memory, 30) == {0: 0.375, 1: 0, 2: 0, 3: 0}
    wide = Memory(activation_bytes=dict.fromkeys(range(4), 10), input_bytes=dict.fromkeys(range(4), 5))
    assert least_limit(program, wide) == 25, "stage 0 cannot do with less"
    assert set(shares_of_text("auto", dense("gpipe", 4, 8)).values()) == {0}, "all ranks keep as many"


def test_shares_as_text() -> None:
    program = dense("1f1b", 4, 12)
    assert shares_of_text("0.5,0.25,0,1", program) == {0: 0.5, 1: 0.25, 2: 0, 3: 1}
    assert shares_of_text("1", program) == {0: 1, 1: 1, 2: 1, 3: 0}
    assert shares_of_text("0", program) == dict.fromkeys(range(4), 0)
    held = shares_of_text("1", dense("zb-h1", 4, 12))
    assert held == {0: 1, 1: 1, 2: 1, 3: 1}, "what waits for its W cannot be recomputed, so no share is enough"
    both = shares_of_text("0.5", dense("interleaved", 2, 4))
    assert both[0] == both[2] == 0.5
    for text, line in (
        ("0.5,1", "expected 1 recomputed share or 4, one per stage, got 0.5,1"),
        ("1.5", "recomputed shares must be 0 to 1, got 1.5"),
        ("half", "expected recomputed shares such as 0.5 or 0.5,0.25,0, or auto, got 'half'"),
    ):
        with pytest.raises(ScheduleError) as caught:
            shares_of_text(text, program)
        assert str(caught.value) == line


def test_a_recomputation_takes_as_long_as_the_forward() -> None:
    """Every stage's backward is longer by the recomputed share of its forward."""
    costs = {"F": 3, "B": 5}
    program = dense("1f1b", 1, 8)
    assert simulate(add_recompute(program, {0: 0.5}), costs).makespan == simulate(program, costs).makespan + 4 * 3
    assert simulate(add_recompute(program, {0: 0.5}), {**costs, "REC": 2}).makespan == 8 * 8 + 4 * 2
