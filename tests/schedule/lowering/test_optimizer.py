from __future__ import annotations

from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.program import Program, Stage
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad, add_unshard
from bagpipe.schedule.lowering.rewrite import flatten_pipes
from tests.schedule.dense import dense, rows
from tests.schedule.tables import lanes

HOME = {f"rank{rank}": rank for rank in range(4)}
ONE = dict.fromkeys(HOME, 0)


def test_reductions_have_a_lane_and_the_optimizer_waits_for_them() -> None:
    program = dense("zb-h1", 2, 2)
    both = add_optimizer(add_reduce_grad(program, HOME), HOME)
    assert rows(both) == [
        "0F0,0F1,0I0,0W0,0I1,0W1,0OPT0",
        "1F0,1I0,1F1,1I1,1W0,1W1,1OPT0",
        "0REDUCE_GRAD0",
        "1REDUCE_GRAD0",
    ]
    assert list(both.lanes) == ["rank0", "rank1", "reduce0", "reduce1"]
    check(both)
    assert {edge.text for edge in set(both.edges) - set(program.edges)} == {
        "0REDUCE_GRAD(b) <- 0W(b)",
        "0OPT(b) <- 0REDUCE_GRAD(b)",
        "1REDUCE_GRAD(b) <- 1W(b)",
        "1OPT(b) <- 1REDUCE_GRAD(b)",
    }


def test_without_reductions_the_optimizer_waits_for_the_gradients() -> None:
    program = dense("zb-h1", 2, 2)
    lowered = add_optimizer(program, HOME)
    assert rows(lowered)[1] == "1F0,1I0,1F1,1I1,1W0,1W1,1OPT0"
    assert {edge.text for edge in set(lowered.edges) - set(program.edges)} == {"0OPT(b) <- 0W(b)", "1OPT(b) <- 1W(b)"}
    check(lowered)


def test_both_are_once_per_batch() -> None:
    program = Program(lanes=lanes(a="0F0 0F1 0B0 0F2 0B1 0F3 0B3 0B2"), stages=(Stage(number=0, micro_per_batch=2),))
    lowered = add_optimizer(add_reduce_grad(program, {"a": 0}), {"a": 0})
    assert rows(lowered) == ["0F0,0F1,0B0,0F2,0B1,0OPT0,0F3,0B3,0B2,0OPT1", "0REDUCE_GRAD0,0REDUCE_GRAD1"]


def test_pipes_of_one_process_share_reduction_and_optimizer() -> None:
    lowered = add_optimizer(add_reduce_grad(flatten_pipes(dense("chimera", 2, 4)), ONE), ONE)
    assert rows(lowered)[2] == "0REDUCE_GRAD0,1REDUCE_GRAD0"
    texts = {edge.text for edge in lowered.edges}
    assert {"0REDUCE_GRAD(b) <- 0W(b)", "0REDUCE_GRAD(b) <- 2W(b)", "2F(b) <- 0OPT(b-1)"} <= texts
    assert not any(edge.dst == "OPT" and edge.dst_stage > 1 for edge in lowered.edges)


def test_processes_reduce_shared_parameters_in_one_order() -> None:
    flat = flatten_pipes(dense("chimera", 4, 4))
    parameters = {stage.number: stage.parameters for stage in flat.stages}
    orders = [
        [parameters[action.stage] for action in actions]
        for lane, actions in add_reduce_grad(flat, HOME).lanes.items()
        if lane.startswith("reduce")
    ]
    assert orders == [[0, 3], [1, 2], [1, 2], [0, 3]]


def test_divided_stages_are_gathered_between_the_step_and_the_next_forward() -> None:
    program = add_optimizer(add_reduce_grad(flatten_pipes(dense("chimera", 2, 4)), ONE), ONE)
    lowered = add_unshard(program, ONE)
    check(lowered)
    assert rows(lowered)[2] == "0REDUCE_GRAD0,1REDUCE_GRAD0,0UNSHARD0,1UNSHARD0"
    assert {edge.text for edge in set(lowered.edges) - set(program.edges)} == {
        "0UNSHARD(b) <- 0OPT(b)",
        "1UNSHARD(b) <- 1OPT(b)",
        *(f"{stage}F(b) <- {stage % 2}UNSHARD(b-1)" for stage in range(4)),
    }
    timed = simulate(lowered, {"REDUCE_GRAD": 2, "OPT": 1, "UNSHARD": 3}).timed
    times = {each.action.text: each for each in timed}
    assert times["0UNSHARD0"].start >= times["0OPT0"].finish
    assert max(each.finish for each in timed) == times["1UNSHARD0"].finish


def test_gathers_follow_the_sums_of_their_batch() -> None:
    program = Program(lanes=lanes(a="0F0 0B0 0F1 0B1"), stages=(Stage(number=0),))
    lowered = add_unshard(add_optimizer(add_reduce_grad(program, {"a": 0}), {"a": 0}), {"a": 0})
    assert rows(lowered)[1] == "0REDUCE_GRAD0,0UNSHARD0,0REDUCE_GRAD1,0UNSHARD1"
    alone = add_unshard(add_optimizer(program, {"a": 0}), {"a": 0})
    assert rows(alone)[1] == "0UNSHARD0,0UNSHARD1"
    check(alone)
