from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES, dense_schedule

SCHEDULES = tuple(DENSE_SCHEDULES)


def program_of(name: str, *, processes: bool = False, replicas: int = 1, recompute: bool = False) -> StepProgram:
    stages = 4
    return step_program(
        chain(stages, 8),
        [(0, True), (2, True), (stages - 1, False)],
        name,
        num_processes=DENSE_SCHEDULES[name].num_ranks(stages) if processes else 1,
        replicas=replicas,
        recompute=recompute,
    )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_in_one_process_and_in_many(name: str, processes: bool, replicas: int) -> None:
    step = program_of(name, processes=processes, replicas=replicas)
    check(step.program)
    assert [instance.number for instance in step.instances] == list(range(4 * step.num_pipes))
    assert len(step.embedding_stages) == step.num_processes
    assert sorted(pipe for embedding in step.embedding_stages for pipe in embedding.pipes) == list(
        range(step.num_pipes)
    )
    sends = [atom for atom in step.program.atoms() if OPS[atom.op].role == "send"]
    assert bool(sends) == processes


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lane_pools_first_and_optimizes_last(name: str) -> None:
    step = program_of(name, processes=True)
    for lane in (f"compute{process}" for process in range(step.num_processes)):
        ops = [action.op for action in step.program.lanes[lane]]
        assert ops[0] == "X_EMBED"
        last = ops.index("X_EMBED_GRAD")
        assert set(ops[last + 1 :]) == {"OPT"}
        held = {instance.stage for instance in step.instances if f"compute{instance.position}" == lane}
        assert ops.count("OPT") == len(held)


def test_two_pipes_in_one_process_share_the_optimizer_step() -> None:
    step = program_of("chimera")
    optimized = [atom.stage for atom in step.program.atoms() if atom.op == "OPT"]
    assert optimized == [0, 1, 2, 3]
    later = {(e.src_stage, e.dst_stage) for e in step.program.edges if e.src == "OPT" and e.delay == 1}
    assert later == {(0, 4), (1, 5), (2, 6), (3, 7)}
    reduces = step.program.lanes["reduce0"]
    assert [action.text for action in reduces] == ["0REDUCE_GRAD0", "1REDUCE_GRAD0", "2REDUCE_GRAD0", "3REDUCE_GRAD0"]


def test_both_holders_of_a_stage_reduce_it_in_the_same_order() -> None:
    step = program_of("chimera", processes=True)
    orders = {
        lane: [step.instances[action.stage].stage for action in actions]
        for lane, actions in step.program.lanes.items()
        if lane.startswith("reduce")
    }
    assert orders == {"reduce0": [0, 3], "reduce1": [1, 2], "reduce2": [1, 2], "reduce3": [0, 3]}


def test_one_pipe_of_one_replica_reduces_nothing() -> None:
    assert not any(atom.op == "REDUCE_GRAD" for atom in program_of("1f1b", processes=True).program.atoms())


def test_stages_are_gathered_once_per_batch_where_they_are_divided() -> None:
    """Breadth-first: one reduction and one gather per stage and batch, none of them between micro-batches."""
    step = step_program(chain(4, 4), [(0, True)], "breadth-first", chunks=2, num_processes=2, replicas=2, shards=True)
    found = [step.program.lanes[lane] for lane in ("reduce0", "reduce1")]
    assert [[action.text for action in row] for row in found] == [
        ["0REDUCE_GRAD0", "2REDUCE_GRAD0", "0UNSHARD0", "2UNSHARD0"],
        ["1REDUCE_GRAD0", "3REDUCE_GRAD0", "1UNSHARD0", "3UNSHARD0"],
    ]
    with pytest.raises(ScheduleError, match=r"pipedream: .* parameters with versions stay whole on each"):
        step_program(chain(2, 2), [(0, True)], "pipedream", num_processes=2, replicas=2, gathers=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_comes_before_each_backward(name: str) -> None:
    atoms = program_of(name, recompute=True).program.atoms()
    recomputed = {(a.stage, a.index) for a in atoms if a.op == "REC"}
    assert recomputed == {(a.stage, a.index) for a in atoms if a.op == "F"}


@given(data=st.data())
def test_any_graph_of_stages_becomes_a_program_for_one_process_and_for_many(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    pairs = [(p, c) for c in range(size) for p in range(c)]
    edges = tuple(pair for pair in pairs if data.draw(st.booleans()))
    micro = tuple(data.draw(st.sampled_from([1, 2, 3, 4])) for _ in range(size))
    graph = StageGraph(micro_per_batch=micro, edges=edges)
    embedding_stages = [(stage, data.draw(st.booleans())) for stage in range(size) if not graph.producers[stage]]
    for processes in {1, size}:
        check(step_program(graph, embedding_stages, "graph", num_processes=processes).program)


def test_wrong_requests_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"no dense schedule 'zigzag'; there are 1f1b, .*zb-v"):
        dense_schedule("zigzag")
    with pytest.raises(ScheduleError, match="1f1b: 4 pipeline ranks need 1 or 4 processes, got 3"):
        step_program(chain(4, 4), [(0, True)], "1f1b", num_processes=3)
