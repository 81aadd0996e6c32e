from __future__ import annotations

from itertools import accumulate

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, check_loop
from bagpipe.schedule.analysis.memory import Memory
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.gathers import ACTIVE_STAGES, add_gathers
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.schedule.schedule import AsynchronousSchedule
from tests.schedule.dense import dense, rows

SYNCHRONOUS = [name for name, schedule in DENSE_SCHEDULES.items() if not isinstance(schedule, AsynchronousSchedule)]
HOME = {f"rank{rank}": rank for rank in range(4)}


def lowered(name: str, ranks: int, micro: int, chunks: int, active_stages: int = ACTIVE_STAGES) -> Program:
    program = add_optimizer(add_reduce_grad(dense(name, ranks, micro, chunks), HOME), HOME)
    return add_gathers(program, HOME, active_stages=active_stages)


def whole_at_once(program: Program, lane: str) -> int:
    """Most stages of a lane's gathers that are whole at a time."""
    steps = {"UNSHARD": 1, "RESHARD": -1}
    return max(accumulate(steps.get(action.op, 0) for action in program.lanes[lane]))


def test_breadth_first_gathers_for_all_forwards_and_for_all_backwards() -> None:
    """The two stages around the turn stay whole."""
    program = lowered("breadth-first", 2, 4, 4)
    assert rows(program)[2].split(",") == [
        *("0UNSHARD0", "2UNSHARD0", "0RESHARD0", "4UNSHARD0", "2RESHARD0", "6UNSHARD0"),
        *("6RESHARD0", "2UNSHARD1", "6REDUCE_GRAD0", "4RESHARD0", "0UNSHARD1", "4REDUCE_GRAD0"),
        *("2RESHARD1", "2REDUCE_GRAD0", "0RESHARD1", "0REDUCE_GRAD0"),
    ]
    assert {stage.number: stage.gathers for stage in program.stages if stage.number % 2 == 0} == {
        0: 2,
        2: 2,
        4: 1,
        6: 1,
    }
    check(program)


@pytest.mark.parametrize(
    ("name", "chunks", "active", "gathers", "at_once"),
    [
        ("breadth-first", 4, 1, (2, 2, 2, 1), 1),
        ("breadth-first", 4, 3, (2, 1, 1, 1), 3),
        ("breadth-first", 2, 2, (1, 1), 2),
        ("gpipe", 1, 2, (1,), 1),
        ("1f1b", 1, 1, (1,), 1),
        ("interleaved", 2, 2, (1, 1), 2),
        ("interleaved", 4, 2, (1, 1, 1, 1), 4),  # a third gather of a stage would be needed
    ],
)
def test_gathers_of_a_stage(name: str, chunks: int, active: int, gathers: tuple[int, ...], at_once: int) -> None:
    program = lowered(name, 2, 8, chunks, active)
    assert tuple(stage.gathers for stage in program.stages[::2]) == gathers
    assert whole_at_once(program, "reduce0") == at_once
    whole = simulate(program, memory=Memory(whole_bytes={stage.number: 10 for stage in program.stages})).lanes
    assert (whole["reduce0"].peak_bytes, whole["rank0"].peak_bytes) == (10 * at_once, 0)


def test_the_next_stage_is_gathered_while_one_computes() -> None:
    program = lowered("breadth-first", 2, 4, 4)
    costs = {"UNSHARD": 3, "REDUCE_GRAD": 3, "OPT": 0}
    begun = {each.action.text: each for each in simulate(program, costs).timed if each.lane in ("rank0", "reduce0")}
    assert begun["2UNSHARD0"].finish <= begun["2F0"].start
    assert begun["4UNSHARD0"].start >= begun["0F3"].finish, "in the room of stage 0"
    hidden, free = simulate(program, costs), simulate(program, {**costs, "UNSHARD": 0})
    # Only the first gather of a batch has no computation beside it.
    assert hidden.makespan <= free.makespan + 3 + 3


def step_of(name: str, *, processes: bool, replicas: int) -> StepProgram:
    schedule = DENSE_SCHEDULES[name]
    stages = 4 * schedule.chunks
    ranks = schedule.num_ranks(stages, None) if processes else 1
    return step_program(
        chain(stages, 8),
        [(0, True)],
        name,
        num_processes=ranks,
        replicas=replicas,
        recompute=not processes,
        gathers=True,
    )


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("processes", [False, True])
def test_every_schedule_has_a_valid_step_and_loop(name: str, processes: bool) -> None:
    step = step_of(name, processes=processes, replicas=2)
    parameters = {stage.number: stage.parameters for stage in step.program.stages}
    assert max(stage.gathers for stage in step.program.stages) <= 2
    texts = {process: set[str]() for process in range(step.num_processes)}
    for process in texts:
        lane = step.program.lanes[f"reduce{process}"]
        held = {parameters[instance.number] for instance in step.instances if instance.process == process}
        assert {parameters[action.stage] for action in lane} == held
        assert sum(action.op == "REDUCE_GRAD" for action in lane) == len(held), "one reduction per stage and batch"
        loop = prefetch_loop(
            prefetch_depth=2, read_ahead=4, write_depth=2, ranks=2 * step.num_processes, step=step, process=process
        )
        check_loop(loop)
        assert loop.lanes[f"compute{process}"][0].op == "X_TURN", "no gather of a batch before its turn"


def test_several_batches_repeat_the_gathers() -> None:
    one = lowered("breadth-first", 1, 2, 3, 1)
    assert [each for each in rows(one)[1].split(",") if each.startswith("0")] == [
        *("0UNSHARD0", "0RESHARD0", "0UNSHARD1", "0RESHARD1", "0REDUCE_GRAD0")
    ]
    loop = prefetch_loop(
        prefetch_depth=2,
        read_ahead=4,
        write_depth=2,
        ranks=2,
        step=step_program(
            chain(3, 2), [(0, True)], "breadth-first", chunks=3, replicas=2, gathers=True, active_stages=1
        ),
    )
    texts = [action.text for action in loop.unroll(2).lanes["reduce0"] if action.stage == 0]
    assert texts == [
        *("0UNSHARD0", "0RESHARD0", "0UNSHARD1", "0RESHARD1", "0REDUCE_GRAD0"),
        *("0UNSHARD2", "0RESHARD2", "0UNSHARD3", "0RESHARD3", "0REDUCE_GRAD1"),
    ]


def test_what_cannot_be_gathered_is_refused() -> None:
    with pytest.raises(ScheduleError, match="active stages must be at least 1, got 0"):
        lowered("1f1b", 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match=r"pipedream: .* parameters with versions stay whole on each"):
        step_program(chain(2, 2), [(0, True)], "pipedream", num_processes=2, replicas=2, gathers=True)
