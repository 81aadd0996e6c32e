from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import RUNNER_RULES, check, check_loop
from bagpipe.schedule.analysis.costs import cost_function
from bagpipe.schedule.analysis.periodic import periodic, repeated
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.precondition import Preconditioning, add_preconditioning, place_preconditioning
from bagpipe.schedule.lowering.stage_lanes import stage_lanes
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.second_order import ORDERED, Case, cases, plain
from tests.schedule.tables import lanes

WORK = ("COV_A", "COV_G", "X_INV")


def texts(program: Program, lane: str) -> str:
    return " ".join(action.text for action in program.lanes[lane])


@given(cases())
def test_the_program_is_valid_and_keeps_the_order_of_all_else(case: Case) -> None:
    check(case.program)
    check(repeated(case.program, 3))
    for lane, row in case.base.lanes.items():
        kept = [a for a in case.program.lanes[lane] if a.op not in (*WORK, "REDUCE_COV", "PRECOND", "X_BCAST", "X_KL")]
        assert kept == list(row)


@given(cases())
def test_work_has_one_order_per_schedule(case: Case) -> None:
    """Whatever the durations: covariances in the order of forwards and backwards, inverses by layers."""
    for row in case.program.lanes.values():
        atoms = [atom for action in row for atom in action.atoms]
        for stage in {atom.stage for atom in atoms if atom.op == "COV_A"}:
            order = {op: [a.index for a in atoms if (a.stage, a.op) == (stage, op)] for op in ("F", "COV_A", "COV_G")}
            assert order["COV_A"] == order["F"]
            assert order["COV_G"] == [a.index for a in atoms if a.stage == stage and a.op in ("B", "W")]
            inverses = [a.index for a in atoms if (a.stage, a.op) == (stage, "X_INV")]
            assert inverses == sorted(inverses)


@given(cases())
def test_a_batch_takes_no_longer_than_what_does_not_fit(case: Case) -> None:
    """In the steady state, which no simulation of some batches exceeds."""
    timing = periodic(case.program, case.costs)
    ends = max(start + cost for start, cost in zip(timing.starts, timing.costs, strict=True))
    slack = 1e-6 * (1 + ends)
    assert simulate(repeated(case.program, 5), case.costs).makespan <= ends + 4 * timing.period + slack
    assert not case.is_bounded or timing.period <= case.placement.bound + slack
    is_summed = any(atom.op == "REDUCE_COV" for atom in case.program.atoms())
    if not is_summed and not any(lane.unfit for lane in case.placement.lanes.values()):
        assert timing.period == pytest.approx(case.placement.period_without)


@given(cases())
def test_all_work_is_placed_or_named_as_unfit(case: Case) -> None:
    cost = cost_function(case.costs)
    for name, lane in case.placement.lanes.items():
        work = sorted((a for a in case.program.lanes[name] if a.op in WORK), key=str)
        assert sorted((*(timed.action for timed in lane.placed), *lane.unfit), key=str) == work
        assert lane.unfit_time == pytest.approx(sum(map(cost, lane.unfit)))
        ends = [(timed.start, timed.finish) for timed in lane.placed]
        assert all(start <= finish for start, finish in ends)


def test_a_stage_of_one_rank() -> None:
    base, home = plain("1f1b", 2, 2)
    program = add_preconditioning(base, home, Preconditioning(layers={0: 2, 1: 1}))
    assert texts(program, "rank0") == (
        "0F0 0F1 0COV_A0 0COV_A1 0B0 0COV_G0 0B1 0COV_G1 0X_INV0 0X_INV1 0PRECOND0 0OPT0"
    )
    # The gap before its steps: rank 1 has time until its first forward of the next batch.
    assert texts(program, "rank1") == "1F0 1B0 1F1 1B1 1COV_A0 1COV_G0 1COV_A1 1COV_G1 1X_INV0 1PRECOND0 1OPT0"
    assert {stage.number: stage.layers for stage in program.stages} == {0: 2, 1: 1}
    edges = {edge.text for edge in program.edges}
    assert {"0COV_A(b) <- 0F(b)", "0COV_G(b) <- 0W(b)", "0X_INV(b) <- 0COV_A(b)", "0X_INV(b) <- 0COV_G(b)"} <= edges
    assert {"0PRECOND(b) <- 0X_INV(b)", "0PRECOND(b) <- 0W(b)", "0OPT(b) <- 0PRECOND(b)"} <= edges


def test_with_lag_1_inverses_come_first_and_covariances_can_come_last() -> None:
    base, home = plain("1f1b", 2, 2)
    program = add_preconditioning(base, home, Preconditioning(layers={0: 1, 1: 1}, lag=1))
    assert texts(program, "rank0") == "0F0 0F1 0COV_A0 0COV_A1 0B0 0COV_G0 0B1 0X_INV0 0PRECOND0 0OPT0 0COV_G1"
    assert "0X_INV(b) <- 0COV_G(b-1)" in {edge.text for edge in program.edges}
    check(program)


def test_recomputed_inputs_are_there_when_they_are_recomputed() -> None:
    base, home = plain("1f1b", 2, 4, recompute=0.5)
    program = add_preconditioning(base, home, Preconditioning(layers={0: 1}))
    edges = {(edge.src, edge.units) for edge in program.edges if edge.dst == "COV_A"}
    assert edges == {("F", ((0, 0), (2, 2))), ("REC", ((1, 1), (3, 3)))}
    row = [action.text for action in program.lanes["rank0"]]
    assert row.index("0COV_A1") > row.index("0REC1")


def test_a_stage_without_layers_has_no_such_action() -> None:
    base, home = plain("1f1b", 2, 2)
    program = add_preconditioning(base, home, Preconditioning(layers={0: 0, 1: 1}, limits=True))
    assert {atom.op for atom in program.atoms() if atom.stage == 0} == {"F", "B", "OPT"}
    assert texts(program, "reduce1") == "1X_KL0"
    assert "reduce0" not in program.lanes


@pytest.mark.parametrize(
    ("lag", "exchanges"),
    [
        (0, "0REDUCE_GRAD0 2REDUCE_GRAD0 0REDUCE_COV0 2REDUCE_COV0 0X_BCAST0 2X_BCAST0 0X_KL0"),
        (1, "0REDUCE_GRAD0 2REDUCE_GRAD0 0X_BCAST0 2X_BCAST0 0X_KL0 0REDUCE_COV0 2REDUCE_COV0"),
    ],
)
def test_exchanges_are_in_one_order_on_all_processes(lag: int, exchanges: str) -> None:
    base, home = plain("breadth-first", 4, 4, replicas=2)
    work = Preconditioning(layers=dict.fromkeys(range(4), 1), lag=lag, limits=True, summed=True)
    program = add_preconditioning(base, home, work)
    assert texts(program, "reduce0") == exchanges
    assert texts(program, "reduce1") == exchanges.replace("2", "3").replace("0R", "1R").replace("0X", "1X")
    limits = {edge.src_stage for edge in program.edges if edge.dst_key == (1, "X_KL") and edge.src == "PRECOND"}
    assert limits == {0, 1, 2, 3}, "of all processes"


def test_two_pipes_in_a_process_invert_the_factors_of_both() -> None:
    base, home = plain("chimera", 2, 4, processes=False)
    program = add_preconditioning(base, home, Preconditioning(layers={0: 1, 1: 1}))
    assert [atom.text for atom in program.atoms() if atom.op == "X_INV"] == ["0X_INV0", "1X_INV0"]
    sources = {edge.src_stage for edge in program.edges if edge.dst_key == (0, "X_INV")}
    assert sources == {0, 2}
    check(program)


def test_a_reduction_hides_the_work_of_the_last_micro_batch() -> None:
    """With enough idle time all fits, and a batch takes as long as with PRECOND alone."""
    base, home = plain("1f1b", 4, 8, replicas=2)
    for lag in (0, 1):
        work = Preconditioning(layers=dict.fromkeys(range(4), 2), lag=lag)
        costs = {"REDUCE_GRAD": 6, "COV_A": 0.25, "COV_G": 0.25}
        program, placement = place_preconditioning(base, home, work, costs)
        assert not any(lane.unfit for lane in placement.lanes.values())
        assert periodic(program, costs).period == placement.period_without == placement.bound


def test_the_bound_is_reached() -> None:
    """The last COV_G of rank 0 lies between the last backward and the next forward, which wait for each other."""
    base, home = plain("1f1b", 4, 4)
    for lag, unfit in ((0, 3), (1, 1)):
        work = Preconditioning(layers=dict.fromkeys(range(4), 2), lag=lag)
        program, placement = place_preconditioning(base, home, work)
        assert placement.bound == periodic(program).period == placement.period_without + unfit
        assert placement.lanes["rank0"].unfit_time == unfit
        assert placement.lanes["rank0"].unfit[0] == Action(0, "COV_G", 3)


def test_micro_batches_whose_inputs_are_kept_are_counted() -> None:
    base, home = plain("1f1b", 4, 4)
    _, placement = place_preconditioning(base, home, Preconditioning(layers=dict.fromkeys(range(4), 2)))
    assert dict(placement.inputs_kept) == {"rank0": 4, "rank1": 3, "rank2": 2, "rank3": 4}
    assert dict(placement.gradients_kept) == {"rank0": 1, "rank1": 2, "rank2": 4, "rank3": 4}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize(
    ("lag", "processes", "replicas", "limits"), [(0, True, 2, True), (1, True, 1, True), (1, False, 2, False)]
)
def test_every_schedule_has_a_valid_step_and_loop(
    name: str, lag: int, processes: bool, replicas: int, limits: bool
) -> None:
    stages = 2 * DENSE_SCHEDULES[name].chunks
    step = step_program(
        chain(stages, 8),
        [(0, True)],
        name,
        num_processes=DENSE_SCHEDULES[name].num_ranks(stages) if processes else 1,
        replicas=replicas,
        recompute=not processes,
        preconditioning=Preconditioning(layers={0: 2, stages - 1: 1}, lag=lag, limits=limits, summed=True),
        costs={"X_INV": 4},
    )
    check(step.program)
    for process in range(step.num_processes):
        own = stage_lanes(step, process)
        performed = {template.key for row in own.lanes.values() for template in row}
        assert {stage for stage, op in performed if op == "PRECOND"} <= {stage for stage, _ in own.steps}
        ranks = step.num_processes * replicas
        loop = prefetch_loop(
            prefetch_depth=2, read_ahead=4, write_depth=2, ranks=max(2, ranks), step=step, process=process
        )
        check_loop(loop, RUNNER_RULES)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_where_a_checkpoint_follows_the_step_it_has_the_sums_of_the_batch(summed: bool, processes: int) -> None:
    """Forwards of the next batch precede the step, so the sums cannot wait for them."""
    work = Preconditioning(layers={0: 2, 1: 1}, lag=1, limits=True, summed=summed)
    step = step_program(
        chain(2, 4),
        [(0, True)],
        "pipedream-2bw",
        num_processes=processes,
        replicas=2,
        rows_delay=1,
        preconditioning=work,
    )
    row = [action for lane in step.program.lanes.values() for action in lane]
    for stage in (0, 1):
        own = [action for action in row if action.stage == stage]
        last = {op: max(place for place, action in enumerate(own) if action.op == op) for op in ("COV_A", "COV_G")}
        assert max(last.values()) < [action.op for action in own].index("OPT")
    sums = {(edge.src, edge.src_stage) for edge in step.program.edges if edge.dst == "OPT" and edge.delay == 0}
    for stage in (0, 1):
        assert (("REDUCE_COV", stage) if summed else ("COV_G", stage)) in sums


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera", "breadth-first"])
@pytest.mark.parametrize("divides", ["shards", "gathers"])
@pytest.mark.parametrize("lag", [0, 1])
def test_divided_stages_gather_their_parameters_after_the_step(schedule: str, divides: str, lag: int) -> None:
    """`step_program` checks that nothing deadlocks."""
    work = Preconditioning(layers={0: 2, 1: 1}, lag=lag, limits=True, summed=True)
    graph = chain(4 if schedule == "breadth-first" else 2, 2)
    step = step_program(
        graph, [(0, True)], schedule, num_processes=2, replicas=2, preconditioning=work, **{divides: True}
    )
    for process in range(2):
        row = [atom.op for atom in step.program.lanes[f"reduce{process}"]]
        assert row.index("REDUCE_GRAD") < row.index("X_BCAST")
        if divides == "shards":
            assert max(place for place, op in enumerate(row) if op == "X_BCAST") < row.index("UNSHARD")


def test_wrong_requests_are_named() -> None:
    base, home = plain("1f1b", 2, 2)
    for work, message in (
        ({"layers": {0: 1}, "lag": 2}, "lag 0 or 1, got 2"),
        ({"layers": {0: -1}}, "layers of stage 0 must be at least 0, got -1"),
        ({"layers": {0: 0}}, "no stage has a layer"),
        ({"layers": {2: 1}}, "layers are given for stage 2, which the program does not have"),
    ):
        with pytest.raises(ScheduleError, match=message):
            add_preconditioning(base, home, Preconditioning(**work))  # type: ignore[arg-type]
    for program in (Program(lanes=lanes(rank0="0F0 0B0")), repeated(base, 2)):
        with pytest.raises(ScheduleError, match="a program of one batch with optimizer steps and flat pipes"):
            add_preconditioning(program, home, Preconditioning(layers={0: 1}))
    work_of_0 = Preconditioning(layers={0: 1})
    with pytest.raises(ScheduleError, match="the program has COV_A actions already"):
        add_preconditioning(add_preconditioning(base, home, work_of_0), home, work_of_0)


def test_times_of_any_size_are_placed() -> None:
    base, home = plain("1f1b", 2, 2)
    work = Preconditioning(layers={0: 1, 1: 1})
    large, small = (place_preconditioning(base, home, work, {"COV_A": cost})[1] for cost in (1e9, 1e-9))
    assert large.lanes["rank0"].unfit_time > 1e9
    assert Fraction(small.period_without) == Fraction(large.period_without)
