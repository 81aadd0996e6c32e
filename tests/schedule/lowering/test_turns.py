from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import RUNNER_RULES, check, check_loop
from bagpipe.schedule.analysis.residency import residency_problems
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.precondition import Preconditioning
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.lowering.turns import turn_loop
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES


def step_of(
    stages: int,
    micro: int,
    *,
    processes: int = 1,
    replicas: int = 1,
    name: str = "pipedream",
    delay: int = 1,
    parts: tuple[int, ...] = (),
    **more: Any,
) -> StepProgram:
    return step_program(
        chain(stages, micro),
        [(0, True), (stages - 1, False)],
        name,
        num_processes=processes,
        replicas=replicas,
        stage_replicas=parts,
        rows_delay=delay,
        **more,
    )


def loop_of(step: StepProgram, process: int, *, ranks: int) -> Loop:
    return prefetch_loop(
        prefetch_depth=2, read_ahead=4, write_depth=2, direct=True, ranks=ranks, step=step, process=process
    )


def lane_text(step: StepProgram, lane: str) -> str:
    return " ".join(f"{t.text}{t.unit}{t.offset * '+'}" for t in step.turns[lane])


def test_what_lanes_repeat() -> None:
    step = step_of(2, 2)
    assert lane_text(step, "compute0") == "0F1 0B0 2X_EMBED0+ 0F0+ 0B1 2X_EMBED_GRAD0 0OPT0"
    assert lane_text(step, "compute1") == "1F0 1B0 1F1 1B1 1OPT0"
    main = loop_of(step, 0, ranks=1).lanes["compute0"]
    assert (main[-1].op, main[-1].offset) == ("X_UPDATE", 0)
    # Nothing else keeps lane 1 from its step of a batch whose forwards were all made in the turn before.
    assert (main[0].op, main[0].offset) == ("X_TURN", 0)
    assert ("X_TURN", "1OPT") in {(e.src, f"{e.dst_stage}{e.dst}") for e in loop_of(step, 0, ranks=1).edges}
    (update,) = [t for t in loop_of(step_of(2, 2, processes=2), 1, ranks=2).lanes["compute1"] if t.op == "X_UPDATE"]
    assert update.offset == -1
    assert "X_TURN" not in {t.op for t in loop_of(step_of(2, 2, processes=2), 0, ranks=2).lanes["compute0"]}


@given(data=st.data(), stages=st.integers(1, 5), name=st.sampled_from(list(ASYNCHRONOUS_SCHEDULES)))
@settings(max_examples=30, deadline=None)
def test_loops_of_all_processes_are_valid_and_read_rows_in_time(data: st.DataObject, stages: int, name: str) -> None:
    micro = data.draw(st.integers(max(1, stages - 1), 2 * stages))
    parts = data.draw(st.one_of(st.just(()), st.tuples(*[st.integers(1, 3)] * stages)))
    processes, replicas = data.draw(st.sampled_from([1, sum(parts) or stages])), data.draw(st.sampled_from([1, 2]))
    shards, recompute = replicas > 1 and data.draw(st.booleans()), data.draw(st.booleans())
    factors = Preconditioning(layers=dict.fromkeys(range(stages), 1), lag=1) if data.draw(st.booleans()) else None
    step = step_of(
        stages,
        micro,
        processes=processes,
        replicas=replicas,
        name=name,
        parts=parts,
        shards=shards,
        recompute=recompute,
        preconditioning=factors,
    )
    check(step.program)
    together = turn_loop(step.program, step.turns, step.embedding_stages[0])
    check(together.unroll(7))  # sends and receives match, ramps included
    for process in range(processes):
        loop = loop_of(step, process, ranks=processes * replicas)
        check_loop(loop, RUNNER_RULES)
        order = loop.unroll(7).lanes[f"compute{step.embedding_stages[process].position}"]
        follows_steps(step, loop)
        places = {(a.op, a.index): place for place, a in enumerate(order) if a.op in ("X_EMBED", "X_UPDATE")}
        for b in range(6):
            assert places["X_EMBED", b + 1] < places["X_UPDATE", b]
            assert b == 0 or places["X_UPDATE", b - 1] < places["X_EMBED", b + 1]


def follows_steps(step: StepProgram, loop: Loop) -> None:
    """Whatever a lane computes in a turn waits for the steps of the turn before, in its own lane or another one."""
    steps = {t.stage: lane for lane, row in loop.lanes.items() for t in row if t.op == "OPT"}
    for instance in step.instances:
        lane, holder = f"compute{instance.position}", instance.stage
        if lane in loop.lanes and holder in steps and steps[holder] != lane:
            into = {
                e.dst: (e.delay, e.units)
                for e in loop.edges
                if (e.src, e.src_stage) == ("OPT", holder) and e.dst_stage == instance.number
            }
            own = [t for t in loop.lanes[lane] if t.stage == instance.number and t.op in ("F", "REC", "B")]
            (first, *_) = own
            key = "I" if first.op == "B" else first.op
            assert into[key] == (1 + first.offset, ((0, first.unit),))


def test_a_part_in_the_lane_of_no_step_waits_for_the_step_of_its_stage() -> None:
    step = step_of(2, 2, parts=(2, 1))
    assert lane_text(step, "compute1") == "2F1 2B0 2F0+ 2B1"
    assert lane_text(step, "compute2") == "1F0 1B0 1F1 1B1 1OPT0"
    edges = {(e.src, e.dst, e.delay, e.units) for e in step.program.edges if (e.src_stage, e.dst_stage) == (0, 2)}
    assert edges == {
        ("OPT", "F", 1, ((0, 1),)),
        ("OPT", "I", 1, ((0, 0),)),
        ("F", "F", 0, ((0, 0),)),
    }


def test_a_process_with_a_further_part_of_the_first_stage_updates_rows_at_the_start_of_a_turn() -> None:
    step = step_of(2, 2, processes=3, parts=(2, 1))
    main = loop_of(step, 1, ranks=3).lanes["compute1"]
    assert [(t.op, t.offset) for t in main[:2]] == [("X_EMBED", 0), ("X_UPDATE", -1)]


def seconds(action: Action) -> float:
    return {"F": 1.0, "B": 2.0}.get(action.op, 0.0)


@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (2, 8), (4, 3), (4, 8)])
def test_no_lane_waits_once_the_pipeline_is_full(stages: int, micro: int) -> None:
    """A batch takes as long as its forwards and backwards in one lane; without the delay it drains the pipeline."""
    for delay, expected in ((0, 3 * (micro + stages - 1)), (1, 3 * micro)):
        loop = loop_of(step_of(stages, micro, delay=delay), 0, ranks=1)
        spans = [simulate(loop.unroll(batches), seconds).makespan for batches in (20, 30)]
        assert (spans[1] - spans[0]) / 10 == expected


@pytest.mark.parametrize("micro", [3, 5])
@pytest.mark.parametrize("stage", range(4))
def test_what_follows_a_step_waits_for_the_new_weights(stage: int, micro: int) -> None:
    """Forwards before the step do not. With as many micro-batches as stages behind, all forwards are a batch ahead."""
    step = step_of(4, micro, replicas=2, shards=True, recompute=True)
    own = {(e.dst, e.delay, e.units) for e in step.program.edges if e.src == "UNSHARD" and e.dst_stage == stage}
    offset, unit = divmod(3 - stage, micro)
    assert own == {("F", 1 + offset, ((0, unit),)), ("REC", 1, ((0, 0),)), ("I", 1, ((0, 0),))}
    together = turn_loop(step.program, step.turns, step.embedding_stages[0])
    program = together.unroll(7)
    assert not list(residency_problems(program))
    lacking = tuple(e for e in program.edges if (e.src, e.dst_stage) != ("UNSHARD", stage))
    problems = list(residency_problems(dataclasses.replace(program, edges=lacking)))
    assert any(problem.endswith(f"does not wait for {stage}UNSHARD0") for problem in problems)


def test_recomputation_precedes_its_backward() -> None:
    step = step_program(chain(2, 2), [(0, True), (1, False)], "pipeoptim", recompute=True, rows_delay=1)
    assert lane_text(step, "compute0") == "0F1 0REC0 0B0 2X_EMBED0+ 0F0+ 0REC1 0B1 2X_EMBED_GRAD0 0OPT0"


@pytest.mark.parametrize(
    ("name", "micro", "delay", "complaint"),
    [
        ("1f1b", 4, 1, "1f1b: only an asynchronous schedule"),
        ("pipedream", 2, 1, "at least 3 micro-batches"),
        ("pipedream", 4, 2, "0 or 1, got 2"),
    ],
)
def test_what_has_no_turns(name: str, micro: int, delay: int, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        step_of(4, micro, name=name, delay=delay)
