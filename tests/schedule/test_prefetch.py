from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.schedule.check import check, check_loop
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.simulate import simulate

DEPTHS = st.integers(1, 6)


@given(DEPTHS, DEPTHS, DEPTHS, st.integers(1, 4), st.booleans(), st.booleans())
def test_every_combination_is_valid(
    prefetch_depth: int, read_ahead: int, write_depth: int, microbatches: int, train: bool, direct: bool
) -> None:
    loop = prefetch(
        prefetch_depth=prefetch_depth,
        read_ahead=read_ahead,
        write_depth=write_depth,
        microbatches=microbatches,
        train=train,
        direct=direct,
    )
    check_loop(loop)
    check(loop.unroll(3))


def test_one_micro_batch_is_alive_at_a_time() -> None:
    loop = prefetch(prefetch_depth=2, read_ahead=4, write_depth=2, microbatches=8)
    assert simulate(loop.unroll(3)).peak_in_flight == 1


def test_evaluation_writes_nothing() -> None:
    loop = prefetch(prefetch_depth=2, read_ahead=4, write_depth=2, train=False)
    ops = {template.op for templates in loop.lanes.values() for template in templates}
    assert ops == {"X_READ", "X_GET", "X_PUT", "F"}
    assert loop.sink == (0, "F")


@pytest.mark.parametrize("name", ["prefetch_depth", "read_ahead", "write_depth", "microbatches"])
def test_depths_below_one_are_refused(name: str) -> None:
    depths = {"prefetch_depth": 1, "read_ahead": 1, "write_depth": 1, "microbatches": 1, name: 0}
    with pytest.raises(ScheduleError, match=f"{name} must be at least 1, got 0"):
        prefetch(**depths)
