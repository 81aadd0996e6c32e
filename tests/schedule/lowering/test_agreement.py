from __future__ import annotations

import pytest

from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.agreement import add_agreement
from bagpipe.schedule.lowering.embedding import add_embedding
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad
from bagpipe.schedule.lowering.precondition import Preconditioning
from bagpipe.schedule.lowering.rewrite import flatten_pipes
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, TRAINED_SCHEDULES
from tests.schedule.dense import dense, rows

HOME = {f"rank{rank}": rank for rank in range(2)}


def test_two_processes_agree_before_their_steps() -> None:
    program = add_embedding(flatten_pipes(dense("1f1b", 2, 2)), HOME, [(0, True)])
    program = add_optimizer(add_reduce_grad(program, HOME), HOME)
    agreed = add_agreement(program, HOME)
    assert rows(agreed) == [
        "2X_EMBED0,0F0,0F1,0B0,0B1,2X_EMBED_GRAD0,0X_MEASURE0,0OPT0",
        "3X_EMBED0,1F0,1B0,1F1,1B1,3X_EMBED_GRAD0,1X_MEASURE0,1OPT0",
        "0REDUCE_GRAD0,2X_AGREE0",
        "1REDUCE_GRAD0,3X_AGREE0",
    ]
    check(agreed)
    everything = {"0X_MEASURE", "1X_MEASURE", "2X_EMBED_GRAD", "3X_EMBED_GRAD"}
    assert {edge.text for edge in set(agreed.edges) - set(program.edges)} == {
        "0X_MEASURE(b) <- 0REDUCE_GRAD(b)",
        "1X_MEASURE(b) <- 1REDUCE_GRAD(b)",
        "0OPT(b) <- 2X_AGREE(b)",
        "1OPT(b) <- 3X_AGREE(b)",
        *(f"{number}X_AGREE(b) <- {source}(b)" for number in (2, 3) for source in everything),
    }


@pytest.mark.parametrize("name", [name for name in TRAINED_SCHEDULES if not TRAINED_SCHEDULES[name].uses_costs])
@pytest.mark.parametrize("together", [True, False], ids=["one process", "several"])
def test_no_schedule_deadlocks(name: str, together: bool) -> None:
    """`step_program` checks its result; so does it what lanes repeat if rows are read a batch late."""
    schedule = TRAINED_SCHEDULES[name]
    graph = chain(2 * schedule.chunks, 4)
    processes = 1 if together else schedule.num_ranks(graph.num_stages, None)
    for delay in (0, 1) if name in ASYNCHRONOUS_SCHEDULES else (0,):
        step = step_program(graph, [(0, True)], name, num_processes=processes, rows_delay=delay, agrees=True)
        agreements = [atom for atom in step.program.atoms() if atom.op == "X_AGREE"]
        assert len(agreements) == processes


@pytest.mark.parametrize("name", [name for name in TRAINED_SCHEDULES if not TRAINED_SCHEDULES[name].uses_costs])
@pytest.mark.parametrize("lag", [0, 1])
def test_no_schedule_deadlocks_with_factors_before_the_agreement(name: str, lag: int) -> None:
    schedule = TRAINED_SCHEDULES[name]
    graph = chain(2 * schedule.chunks, 4)
    work = Preconditioning(layers=dict.fromkeys(range(graph.num_stages), 2), lag=lag)
    processes = schedule.num_ranks(graph.num_stages, None)
    step = step_program(graph, [(0, True)], name, num_processes=processes, agrees=True, preconditioning=work)
    assert {"X_AGREE", "PRECOND"} <= {atom.op for atom in step.program.atoms()}
