from __future__ import annotations

from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.lowering.covariances import StageSet, covariance_edges, covariance_work
from bagpipe.schedule.lowering.optimizer import holders_of
from tests.schedule.second_order import plain


def sets_of(program: Program, home: dict[str, int], *, layers: int = 1, summed: bool = False) -> list[StageSet]:
    return [
        StageSet(holders=holders, layers=layers, is_shared=summed, is_summed=summed)
        for holders in holders_of(program, home)
    ]


def test_work_follows_forwards_backwards_and_the_work_before_it() -> None:
    program, home = plain("gpipe", 1, 2)
    found = covariance_work(program, sets_of(program, home, layers=2), lag=0)
    named = [(w.action.text, " ".join(a.text for a in w.after), w.after_work, w.after_earlier) for w in found]
    assert named == [
        ("0COV_A0", "0F0", (), ()),
        ("0COV_A1", "0F1", (0,), ()),
        ("0COV_G0", "0B0", (), ()),
        ("0COV_G1", "0B1", (2,), ()),
        ("0X_INV0", "", (0, 1, 2, 3), ()),
        ("0X_INV1", "", (0, 1, 2, 3, 4), ()),
    ]
    assert {w.before.text for w in found if w.before} == {"0PRECOND0"}
    late = covariance_work(program, sets_of(program, home), lag=1)
    assert [(w.after_work, w.after_earlier, w.before is None) for w in late[3:]] == [
        ((2,), (), True),
        ((), (0, 1, 2, 3), False),
    ]


def test_backwards_from_the_last_micro_batch_give_covariances_in_that_order() -> None:
    program, home = plain("breadth-first", 2, 3, recompute=1)
    found = [w.action.text for w in covariance_work(program, sets_of(program, home)[:1], lag=0)]
    assert found == ["0COV_A0", "0COV_A1", "0COV_A2", "0COV_G2", "0COV_G1", "0COV_G0", "0X_INV0"]
    (edge,) = [e for e in covariance_edges(program, sets_of(program, home)[:1], lag=0) if e.dst == "COV_A"]
    assert (edge.src, edge.units) == ("REC", ())


def test_the_sets_of_two_pipes_have_one_inverse() -> None:
    program, home = plain("chimera", 2, 2, processes=False)
    (first, second) = sets_of(program, home)
    assert (first.number, first.lane, first.stages, second.stages) == (0, "rank0", (0, 2), (1, 3))
    edges = [edge.text for edge in covariance_edges(program, [first], lag=1) if edge.dst == "X_INV"]
    assert edges == [f"0X_INV(b) <- {stage}COV_{kind}(b-1)" for stage in (0, 2) for kind in "AG"]
    (summed, _) = sets_of(program, home, summed=True)
    edges = [edge.text for edge in covariance_edges(program, [summed], lag=0) if edge.dst == "X_INV"]
    assert edges == ["0X_INV(b) <- 0REDUCE_COV(b)"]
