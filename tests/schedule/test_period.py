from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.cycles import delay_free_cycle
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.program import Edge
from tests.schedule.period import period

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")

costs = st.fixed_dictionaries({op: st.integers(0, 9) for op in OPS})


@given(costs)
def test_deep_enough_prefetch_runs_at_the_pace_of_the_busiest_lane(cost: dict[str, int]) -> None:
    loop = prefetch_loop(prefetch_depth=40, read_ahead=80, write_depth=40)
    loads = {lane: sum(cost[t.op] for t in templates) for lane, templates in loop.lanes.items()}
    assert period(loop, lambda t: cost[t.op]).value == max(loads.values())


@given(costs)
def test_depth_one_serialises_fetch_and_insert(cost: dict[str, int]) -> None:
    loop = prefetch_loop(prefetch_depth=1, read_ahead=80, write_depth=40)
    loads = [sum(cost[t.op] for t in templates) for templates in loop.lanes.values()]
    pace = cost["X_INSERT"] + max(cost["X_FETCH"], cost["X_EVICT"])
    assert period(loop, lambda t: cost[t.op]).value == max(*loads, pace)


@given(costs)
def test_direct_mode_serialises_everything(cost: dict[str, int]) -> None:
    """Only reading ahead overlaps, and the dense optimizer step, which touches no row."""
    loop = prefetch_loop(prefetch_depth=4, read_ahead=80, write_depth=4, direct=True)
    serial = sum(cost[op] for op in ("X_EVICT", "X_WRITEBACK", "X_FETCH", "X_INSERT", "F", "B", "X_UPDATE"))
    loads = [sum(cost[t.op] for t in templates) for templates in loop.lanes.values()]
    assert period(loop, lambda t: cost[t.op]).value == max(*loads, serial)


def test_direct_mode_example() -> None:
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=4, direct=True)
    result = period(loop)
    assert result.value == 8
    assert {text for _, text in result.cycle} == {f"0{op}" for op in OPS} - {"0X_READ", "0OPT"}


def test_a_loop_without_delay_has_no_period() -> None:
    loop = prefetch_loop(prefetch_depth=1, read_ahead=1, write_depth=1)
    assert delay_free_cycle(loop) == ()
    # Eviction of batch b after the update of batch b, which needs the insertion that follows the eviction.
    dead = type(loop)(
        lanes=loop.lanes,
        edges=(*loop.edges, Edge(src="X_UPDATE", dst="X_EVICT")),
        source=loop.source,
        sink=loop.sink,
        stages=loop.stages,
    )
    assert delay_free_cycle(dead)
    with pytest.raises(ScheduleError, match="deadlock"):
        period(dead)
