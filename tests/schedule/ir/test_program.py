from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program, Stage, overlapping_units, unit_counts, units_per_batch


@pytest.mark.parametrize(
    ("unit", "units", "src_units", "expected"),
    [
        (0, 1, 1, [0]),  # batch to batch
        (2, 4, 1, [0]),  # batch to micro-batch
        (0, 1, 4, [0, 1, 2, 3]),  # micro-batches to batch
        (2, 4, 4, [2]),  # micro-batch to micro-batch
        (1, 2, 4, [2, 3]),  # two to one
        (1, 3, 2, [0, 1]),  # the middle third touches both halves
    ],
)
def test_units_overlap_by_their_share_of_the_batch(unit: int, units: int, src_units: int, expected: list[int]) -> None:
    assert list(overlapping_units(unit, units, src_units)) == expected


@given(st.integers(1, 12), st.integers(1, 12))
def test_overlap_is_symmetric_and_covers(units: int, src_units: int) -> None:
    forth = {(u, s) for u in range(units) for s in overlapping_units(u, units, src_units)}
    back = {(u, s) for s in range(src_units) for u in overlapping_units(s, src_units, units)}
    assert forth == back
    assert {s for _, s in forth} == set(range(src_units))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delay": -1}, "at least 0"),
        ({"delay": 0, "kind": "capacity"}, "at least 1"),
        ({"kind": "hazard"}, "hazard name"),
        ({"hazard": "fetch_after"}, "hazard name"),
        ({"delay": None}, "only a hazard"),
    ],
)
def test_an_edge_must_make_sense(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Edge(src="X_FETCH", dst="X_INSERT", **fields)  # type: ignore[arg-type]


def test_edge_text() -> None:
    assert (
        Edge(src="X_INSERT", dst="X_FETCH", delay=4, kind="capacity").text == "0X_FETCH(b) <- 0X_INSERT(b-4) capacity"
    )
    hazard = Edge(src="X_WRITEBACK", dst="X_FETCH", delay=None, kind="hazard", hazard="fetch_after")
    assert hazard.text == "0X_FETCH(b) <- 0X_WRITEBACK(fetch_after) hazard fetch_after"


def test_num_batches_counts_in_the_units_of_each_op() -> None:
    lanes = {"a": (Action(0, "F", 5),), "b": (Action(1, "OPT", 1),)}
    program = Program(lanes=lanes, stages=(Stage(number=0, micro_per_batch=2), Stage(number=1, micro_per_batch=2)))
    assert program.num_batches() == 3
    assert Program(lanes={}).num_batches() == 0


def test_every_unit_is_counted_by_stage() -> None:
    counts = unit_counts([Stage(number=0, micro_per_batch=4, gathers=2, layers=3), Stage(number=1)])
    keys = ("F", "UNSHARD", "X_INV", "OPT")
    assert [units_per_batch(counts, (0, op)) for op in keys] == [4, 2, 3, 1]
    assert [units_per_batch(counts, (stage, op)) for stage in (1, 2) for op in keys] == 8 * [1]
    assert units_per_batch(counts, (1, "RECV_F")) == 4, "micro-batches of the sender"


def test_layers_are_no_shares_of_the_batch() -> None:
    """Every layer waits for all micro-batches."""
    assert list(Edge(src="COV_A", dst="X_INV").source_units(1, 2, 4)) == [0, 1, 2, 3]
    assert list(Edge(src="X_INV", dst="PRECOND").source_units(0, 1, 3)) == [0, 1, 2]
    assert list(Edge(src="F", dst="B").source_units(1, 4, 4)) == [1]
