"""Loops composed of parts that share only named points."""

from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check_loop
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point, sort_lanes


def reading_and_dense() -> LoopBuilder:
    loop = LoopBuilder(read_ahead=3)
    loop.lane("compute", "F", "B", "OPT")
    loop.edge(Point.ROWS_READY, "F")
    loop.provide(Point.LOOKUP, "F")
    loop.provide(Point.GRADIENTS, "B")
    loop.lane("data", "X_READ")
    loop.provide(Point.ROWS_READY, "X_READ")
    return loop


def texts(loop: LoopBuilder) -> set[str]:
    return {edge.text for edge in loop.build().loop.edges}


def test_a_point_is_its_last_provider() -> None:
    loop = reading_and_dense()
    before = loop.so_far(Point.ROWS_READY)
    loop.lane("copy", "X_INSERT")
    loop.edge(before, "X_INSERT")
    loop.provide(Point.ROWS_READY, "X_INSERT")
    assert texts(loop) == {"0F(b) <- 0X_INSERT(b)", "0X_INSERT(b) <- 0X_READ(b)", "0X_READ(b) <- 0OPT(b-3) capacity"}
    check_loop(loop.build().loop)


def test_lanes_stand_in_the_order_of_a_batch() -> None:
    assert list(reading_and_dense().build().loop.lanes) == ["data", "compute"]
    names = ("ack", "net-out", "push", "reduce0", "compute10", "compute2", "compute", "pull", "copy", "net-in", "data")
    expected = [
        "data",
        "net-in",
        "copy",
        "pull",
        "compute2",
        "compute10",
        "compute",
        "reduce0",
        "push",
        "net-out",
        "ack",
    ]
    assert list(sort_lanes(names)) == expected
    assert {sort_lanes({"compute", "compute0", "compute1"}) for _ in range(3)} == {("compute0", "compute1", "compute")}
    with pytest.raises(ScheduleError, match=r"no lane 'computer'; expected one of data, net-in, copy"):
        sort_lanes(["computer"])


def test_actions_are_inserted_behind_a_point_and_appended_to_the_main_lane() -> None:
    loop = reading_and_dense()
    loop.insert("X_UPDATE", after=Point.GRADIENTS)
    loop.append("X_ACK")
    composition = loop.build()
    assert [t.op for t in composition.loop.lanes["compute"]] == ["F", "B", "X_UPDATE", "OPT", "X_ACK"]
    assert composition.loop.sink == (0, "X_ACK")
    assert composition.operations(Point.LOOKUP) == ((0, "F"),)


def test_every_compute_lane_holds_reading_back() -> None:
    loop = reading_and_dense()
    loop.lane("compute1", "X_UPDATE")
    assert {"0X_READ(b) <- 0OPT(b-3) capacity", "0X_READ(b) <- 0X_UPDATE(b-3) capacity"} <= texts(loop)


def test_a_point_that_no_part_provides_is_an_error() -> None:
    loop = reading_and_dense()
    loop.edge(Point.STORED, "F")
    with pytest.raises(ScheduleError, match="no part of the loop provides the point 'stored'"):
        loop.build()
    with pytest.raises(ScheduleError, match="no part of the loop provides the point 'step'"):
        reading_and_dense().build().operations(Point.STEP)


def test_an_operation_that_no_lane_performs_is_an_error() -> None:
    loop = reading_and_dense()
    loop.provide(Point.GRADIENTS, "I")
    loop.insert("X_UPDATE", after=Point.GRADIENTS)
    with pytest.raises(ScheduleError, match="no lane performs 0I"):
        loop.build()
