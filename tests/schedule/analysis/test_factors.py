from __future__ import annotations

import dataclasses

import pytest

from bagpipe.schedule.analysis.factors import factor_problems
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.precondition import Preconditioning, add_preconditioning
from tests.schedule.second_order import plain


def program_of(*, summed: bool = False) -> Program:
    base, home = plain("1f1b", 2, 2, replicas=2)
    return add_preconditioning(base, home, Preconditioning(layers={0: 2, 1: 1}, summed=summed))


def without(program: Program, *texts: str) -> Program:
    """The program without these edges."""
    assert set(texts) <= {edge.text for edge in program.edges}
    return dataclasses.replace(program, edges=tuple(edge for edge in program.edges if edge.text not in texts))


def with_lane(program: Program, lane: str, text: str) -> Program:
    return dataclasses.replace(program, lanes={**program.lanes, lane: tuple(parse(cell) for cell in text.split())})


def test_programs_of_the_lowering_have_no_problem() -> None:
    assert not list(factor_problems(program_of()))
    assert not list(factor_problems(program_of(summed=True)))


@pytest.mark.parametrize(
    ("edge", "problem"),
    [
        ("0X_INV(b) <- 0COV_A(b)", "no X_INV waits for 0COV_A"),
        ("0PRECOND(b) <- 0X_INV(b)", "0PRECOND does not wait for 0X_INV"),
        ("0OPT(b) <- 0PRECOND(b)", "0OPT does not wait for 0PRECOND"),
    ],
)
def test_a_missing_edge_is_named(edge: str, problem: str) -> None:
    assert list(factor_problems(without(program_of(), edge))) == [problem]


def test_sums_stand_between_covariances_and_inverses() -> None:
    missing = without(program_of(summed=True), "1REDUCE_COV(b) <- 1COV_G(b)")
    assert list(factor_problems(missing)) == ["no X_INV waits for 1COV_G"]


def test_missing_and_misplaced_actions_are_named() -> None:
    program = Program(lanes={}, edges=(Edge(src="COV_A", dst="X_INV"),))
    assert list(factor_problems(with_lane(program, "a", "0COV_A0 0X_INV0 0OPT0"))) == [
        "stage 0 has COV_A and no COV_G",
        "stage 0 has X_INV and no PRECOND",
        "0OPT does not wait for 0PRECOND",
    ]
    moved = with_lane(
        program_of(), "rank0", "0F0 0F1 0B0 0B1 0COV_A0 0COV_A1 0COV_G0 0COV_G1 0X_INV1 0X_INV0 0PRECOND0"
    )
    assert list(factor_problems(with_lane(moved, "other", "0OPT0"))) == [
        "0X_INV is on lane rank0, 0OPT on other",
        "0X_INV0 comes after 0X_INV1",
    ]


def test_holders_of_a_stage_exchange_in_one_order() -> None:
    base, home = plain("chimera", 2, 4)
    program = add_preconditioning(base, home, Preconditioning(layers={0: 1, 1: 1}, summed=True))
    assert not list(factor_problems(program))
    row = [action.text for action in program.lanes["reduce1"]]
    assert row == [f"{stage}{op}0" for op in ("REDUCE_GRAD", "REDUCE_COV", "X_BCAST") for stage in (2, 1)]
    row[2:4] = row[3], row[2]
    (problem,) = factor_problems(with_lane(program, "reduce1", " ".join(row)))
    assert problem.startswith("lanes reduce0 and reduce1 hold the same parameters, and the one comes to REDUCE_COV0")
