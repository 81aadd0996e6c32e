from __future__ import annotations

from itertools import pairwise

from hypothesis import given

from bagpipe.schedule.analysis.periodic import periodic
from bagpipe.schedule.ir.actions import Action, parse
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.placement import Work, place
from tests.schedule.second_order import Case, cases
from tests.schedule.tables import lanes

#: Lane a waits from 1 to 5 for lane b, and the batch ends with a step of a.
PROGRAM = Program(
    lanes=lanes(a="0F0 0B0 0PRECOND0 0OPT0", b="1F0"),
    edges=(
        Edge(src="F", dst="F", dst_stage=1),
        Edge(src="F", src_stage=1, dst="I"),
        Edge(src="OPT", dst="F", delay=1),
    ),
)
COSTS = {"1F": 4, "PRECOND": 1, "OPT": 1}


def work(text: str, after: str, *, before: str = "0PRECOND0", after_work: tuple[int, ...] = ()) -> Work:
    step = parse(before) if before else None
    return Work(action=parse(text), lane="a", after=(parse(after),), after_work=after_work, before=step)


def row(*items: Work, **costs: float) -> str:
    return " ".join(action.text for action in place(PROGRAM, items, COSTS | costs).lanes["a"])


def test_work_that_is_released_goes_into_the_first_gap_that_is_long_enough() -> None:
    assert row(work("0COV_A0", "0F0"), COV_A=4) == "0F0 0COV_A0 0B0 0PRECOND0 0OPT0"
    assert row(work("0COV_A0", "0F0"), COV_A=4.5) == "0F0 0B0 0COV_A0 0PRECOND0 0OPT0"
    assert row(work("0COV_G0", "0B0"), COV_G=0) == "0F0 0B0 0COV_G0 0PRECOND0 0OPT0"


def test_of_what_can_start_the_earliest_deadline_is_first() -> None:
    late, early = work("0COV_A0", "0F0", before=""), work("0COV_G0", "0F0")
    assert row(late, early) == "0F0 0COV_G0 0COV_A0 0B0 0PRECOND0 0OPT0"
    # The end of the batch is the deadline of the one that does not fit.
    assert row(late, early, COV_A=3, COV_G=2) == "0F0 0COV_G0 0B0 0PRECOND0 0OPT0 0COV_A0"


def test_what_waits_for_work_that_does_not_fit_does_not_fit_either() -> None:
    items = (work("0COV_A0", "0F0"), work("0X_INV0", "0F0", after_work=(0,)))
    placed = place(PROGRAM, items, COSTS | {"COV_A": 5, "X_INV": 1})
    assert " ".join(a.text for a in placed.lanes["a"]) == "0F0 0B0 0COV_A0 0X_INV0 0PRECOND0 0OPT0"
    lane = placed.placements["a"]
    assert (lane.placed, lane.unfit_covariances, lane.unfit_inverses, lane.unfit_time) == ((), 5, 1, 6)


def test_work_of_the_batch_before_takes_what_is_left() -> None:
    covariance = work("0COV_G0", "0B0", before="")
    inverse = Work(action=parse("0X_INV0"), lane="a", after_earlier=(0,), before=parse("0PRECOND0"))
    placed = place(PROGRAM, (covariance, inverse), COSTS | {"COV_G": 2, "X_INV": 3})
    assert " ".join(a.text for a in placed.lanes["a"]) == "0F0 0X_INV0 0B0 0PRECOND0 0OPT0 0COV_G0"
    assert placed.placements["a"].unfit == (Action(0, "COV_G", 0),)


@given(cases())
def test_placed_work_overlaps_nothing_of_its_lane(case: Case) -> None:
    """In the times of the program without it, with the steps moved."""
    moved = ("PRECOND", "X_EMBED", "OPT", "X_BCAST", "X_KL", "REDUCE_COV")
    timing = periodic(case.base, case.costs)
    for name, lane in case.placement.lanes.items():
        taken = [(timed.start, timed.finish) for timed in lane.placed]
        if case.placement.period_without == timing.period:
            taken += [
                (start, start + cost)
                for of, action, start, cost in zip(
                    timing.lane_of, timing.actions, timing.starts, timing.costs, strict=True
                )
                if of == name and action.op not in moved
            ]
        taken.sort()
        for (_, finish), (start, _) in pairwise(taken):
            assert finish <= start + 1e-6
