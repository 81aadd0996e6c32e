from __future__ import annotations

import pytest

from bagpipe.pipeline.report import LaneReport
from trainer.observe.waits import Wait, waited_for


def lane(busy_s: float, **waits_s: float) -> LaneReport:
    named = {f"0{op}": wait_s for op, wait_s in waits_s.items()}
    return LaneReport(busy_s=busy_s, wait_s=sum(waits_s.values()), waits_s=named, actions=1)


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ({"copy": lane(9.0, X_FETCH=1.0)}, ("cache copies", "copy", "X_INSERT")),
        ({"copy": lane(1.0, X_FETCH=9.0), "net-in": lane(9.0)}, ("store reads", "net-in", "X_FETCH")),
        (
            {"copy": lane(1.0, X_FETCH=9.0), "net-in": lane(1.0, X_READ=9.0), "data": lane(9.0)},
            ("cacher", "data", "X_READ"),
        ),
        (
            {"copy": lane(1.0, X_FETCH=9.0), "net-in": lane(1.0, X_WRITEBACK=9.0), "net-out": lane(9.0)},
            ("store writes", "net-out", "X_WRITEBACK"),
        ),
    ],
)
def test_the_first_busy_lane_behind_the_waits_is_named(
    lanes: dict[str, LaneReport], expected: tuple[str, str, str]
) -> None:
    wait = waited_for({}, {"compute": lane(1.0, X_INSERT=5.0), **lanes})
    assert wait == Wait(on=expected[0], lane=expected[1], op=expected[2])


def test_waits_before_the_interval_do_not_count() -> None:
    before = {"compute": lane(1.0, X_PULL=50.0), "copy": lane(9.0)}
    now = {"compute": lane(2.0, X_PULL=50.0, X_INSERT=1.0), "copy": lane(11.0)}
    assert waited_for(before, now) == Wait(on="cache copies", lane="copy", op="X_INSERT")
    assert waited_for(now, now) is None


def test_waits_for_other_stages_are_no_waits_for_rows() -> None:
    assert waited_for({}, {"compute-1": lane(1.0, RECV_F=5.0)}) is None


def test_lanes_that_wait_for_each_other_end_the_search() -> None:
    lanes = {"compute": lane(1.0, X_PULL=5.0), "pull": lane(1.0, X_UPDATE_LATE=5.0), "push": lane(1.0, X_PULL=5.0)}
    assert waited_for({}, lanes) == Wait(on="row updates", lane="push", op="X_UPDATE_LATE")
