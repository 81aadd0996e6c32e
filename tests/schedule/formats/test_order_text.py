from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.dynamic import dynamic, limits
from bagpipe.schedule.formats.order_text import Orders, OrderShape, order_line, orders_of_text, recorded_program
from bagpipe.schedule.ir.stage_graph import chain

SHAPE = OrderShape(graph=chain(2, 2), replicas=1, model="0123", limits=(2, 1))
GOOD = [SHAPE.header, "batch 0 replica 0 rank 0: 0F0,0F1,0B0,0B1", "batch 0 replica 0 rank 1: 1F0,1B0,1F1,1B1"]


def test_a_text() -> None:
    assert SHAPE.header == "# bagpipe orders 1: stages 2, microbatches 2, replicas 1, model 0123"
    found = orders_of_text("\n".join(GOOD) + "\n", SHAPE)
    assert found == {(0, 0, 0): bytes([1, 1, 0, 0]), (0, 0, 1): bytes([1, 0, 1, 0])}


costs = st.fixed_dictionaries({f"{stage}{op}": st.floats(0, 3) for stage in range(3) for op in "FB"})


@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 6), costs, costs)
def test_orders_survive_text(
    ranks: int, micro: int, most: int, first: dict[str, float], second: dict[str, float]
) -> None:
    graph = chain(ranks, micro)
    shape = OrderShape(graph=graph, replicas=2, model="m", limits=limits(graph, most))
    orders: Orders = {
        (5, replica, rank): bytes(action.op == "F" for action in row)
        for replica, own in enumerate((first, second))
        for rank, row in enumerate(dynamic(graph, 1, in_flight=most, costs=own).lanes.values())
    }
    lines = [order_line(key, tracks) for key, tracks in orders.items()]
    assert orders_of_text("\n".join([shape.header, *lines]), shape) == orders


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "expected orders of this job, '# bagpipe orders 1: stages 2, .*', got ''"),
        ([SHAPE.header.replace("0123", "4567")], "expected orders of this job, .* got '.* model 4567'"),
        ([GOOD[0], "batch 0 rank 0"], r"line 2: expected 'batch N replica N rank N: 0F0,0B0,…', got 'batch 0 rank 0'"),
        ([GOOD[0], GOOD[1].replace("rank 0", "rank 2")], "line 2: there is no rank 2 of replica 0"),
        ([GOOD[0], GOOD[1].replace("0F1", "0F2")], "line 2: expected 0F1 or 0B0, got 0F2"),
        ([GOOD[0], GOOD[1] + ",0B2"], "line 2: expected 0F2 or 0B2, got 0B2"),
        ([GOOD[0], GOOD[1].removesuffix(",0B1")], "line 2: expected 2 forwards and backwards, got 2 and 1"),
        ([*GOOD, GOOD[1]], "line 4: batch 0 of rank 0 comes twice"),
        (GOOD[:2], "batch 0 has no order of replica 0 rank 1"),
        ([*GOOD[:2], GOOD[2].replace("1B0,1F1", "1F1,1B0")], "batch 0 has 2 micro-batches in flight on rank 1, .* 1"),
        ([GOOD[0], GOOD[1].replace("0F1,0B0", "0B0,0F1"), GOOD[2].replace("1B0,1F1", "1F1,1B0")], "batch 0: deadlock"),
    ],
)
def test_other_texts_are_refused(lines: list[str], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{complaint}"):
        orders_of_text("\n".join(lines), SHAPE)


def test_one_batch_of_a_text() -> None:
    program = recorded_program("\n".join(GOOD), SHAPE.graph, SHAPE.limits, batch=0)
    assert [" ".join(a.text for a in row) for row in program.lanes.values()] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    with pytest.raises(ScheduleError, match="there is no batch 1 of replica 0"):
        recorded_program("\n".join(GOOD), SHAPE.graph, SHAPE.limits, batch=1)
    with pytest.raises(ScheduleError, match=r"expected orders of this job, .* got 'nothing'"):
        recorded_program("nothing", SHAPE.graph, SHAPE.limits, batch=0)
