from __future__ import annotations

from dataclasses import replace

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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 6), costs, costs)
def test_orders_survive_text(
    counts: list[int], micro: int, most: int, first: dict[str, float], second: dict[str, float]
) -> None:
    """Also those of stages with several ranks."""
    graph = chain(len(counts), micro)
    ranks = tuple(counts) if min(counts) else ()
    shape = OrderShape(graph=graph, replicas=2, model="0f", limits=limits(graph, most), stage_replicas=ranks)
    rows = [[*dynamic(graph, 1, in_flight=most, costs=own).lanes.values()] for own in (first, second)]
    orders: Orders = {
        (5, replica, rank): bytes(action.op == "F" for action in rows[replica][stage])
        for replica in range(2)
        for rank, stage in enumerate(shape.stages)
    }
    text = "\n".join([shape.header, *(order_line(key, tracks, shape) for key, tracks in orders.items())])
    assert orders_of_text(text, shape) == orders
    drawn = recorded_program(text, graph, shape.limits, batch=5, replica=1)
    assert [*drawn.lanes] == [f"rank{rank}" for rank in range(len(shape.stages))]


def test_ranks_of_a_stage_have_orders_of_their_own() -> None:
    shape = replace(SHAPE, stage_replicas=(2, 1))
    assert shape.header == "# bagpipe orders 1: stages 2, ranks 2,1, microbatches 2, replicas 1, model 0123"
    lines = [
        shape.header,
        "batch 0 replica 0 rank 0: 0F0,0F1,0B0,0B1",
        "batch 0 replica 0 rank 1: 0F0,0B0,0F1,0B1",
        "batch 0 replica 0 rank 2: 1F0,1B0,1F1,1B1",
    ]
    program = recorded_program("\n".join(lines), shape.graph, shape.limits, batch=0)
    rows = [" ".join(a.text for a in row) for row in program.lanes.values()]
    assert rows == ["0F0 0F1 0B0 0B1", "2F0 2B0 2F1 2B1", "1F0 1B0 1F1 1B1"], "2 is the second part of stage 0"
    with pytest.raises(
        ScheduleError, match=r"expected orders of this job, .*ranks 2,1.*, got '# bagpipe orders 1: .*'"
    ):
        orders_of_text("\n".join(GOOD), shape)
    with pytest.raises(ScheduleError, match="batch 0 has no order of replica 0 rank 2"):
        orders_of_text("\n".join(lines[:3]), shape)
    lines[3] = lines[3].replace("1B0,1F1", "1F1,1B0")
    with pytest.raises(ScheduleError, match="batch 0: deadlock"):
        orders_of_text("\n".join(lines), shape)


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
