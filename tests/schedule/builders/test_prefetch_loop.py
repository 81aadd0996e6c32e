from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, check_loop
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop

DEPTHS = st.integers(1, 6)


@given(DEPTHS, DEPTHS, DEPTHS, st.integers(1, 4), st.integers(1, 2), st.booleans(), st.booleans(), st.booleans())
def test_every_combination_is_valid(
    prefetch_depth: int,
    read_ahead: int,
    write_depth: int,
    microbatches: int,
    ranks: int,
    train: bool,
    direct: bool,
    clips: bool,
) -> None:
    loop = prefetch_loop(
        prefetch_depth=prefetch_depth,
        read_ahead=read_ahead,
        write_depth=write_depth,
        microbatches=microbatches,
        train=train,
        direct=direct,
        ranks=ranks,
        clips=clips,
    )
    check_loop(loop)
    check(loop.unroll(3))


def test_one_micro_batch_is_alive_at_a_time() -> None:
    loop = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, microbatches=8)
    assert simulate(loop.unroll(3)).peak_in_flight == 1


def test_evaluation_writes_nothing() -> None:
    loop = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, train=False)
    ops = {template.op for templates in loop.lanes.values() for template in templates}
    assert ops == {"X_READ", "X_FETCH", "X_INSERT", "F"}
    assert loop.sink == (0, "F")


def span(simulation: Simulation, text: str) -> tuple[float, float]:
    return next((float(t.start), float(t.finish)) for t in simulation.timed if t.action.text == text)


def test_exchange_overlaps_with_the_compute_of_the_batches_around_it() -> None:
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=4, ranks=2)
    costs = {"F": 10, "B": 20, "X_PULL": 1, "X_PUSH": 1, "X_UPDATE": 1, "OPT": 1}
    simulation = simulate(loop.unroll(6), costs)
    for b in range(2, 5):
        step = (span(simulation, f"0F{b}")[0], span(simulation, f"0B{b}")[1])
        for text in (f"0X_PREPULL{b + 1}", f"0X_PUSH_LATE{b - 1}", f"0X_UPDATE_LATE{b - 1}"):
            start, finish = span(simulation, text)
            assert step[0] - 3 <= start, text  # at the earliest while the step's rows are still in transit
            assert finish <= step[1], text
    # Between two batches' compute: gradients of the shared rows, their update, and the transfer of the rows.
    assert span(simulation, "0F4")[0] - span(simulation, "0B3")[1] == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_parameter_or_row_changes_before_the_norm_is_known(ranks: int) -> None:
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=4, ranks=ranks, clips=True)
    simulation = simulate(loop.unroll(4), {"X_PUSH_LATE": 30, "X_NORM": 7})
    pushes, updates = (["X_PUSH_LATE"], ["X_UPDATE_LATE"]) if ranks > 1 else ([], [])
    for b in range(4):
        start, finish = span(simulation, f"0X_NORM{b}")
        assert start >= max(span(simulation, f"0{op}{b}")[1] for op in ["B", *pushes])
        assert finish <= span(simulation, f"0OPT{b}")[0]
        assert span(simulation, f"0OPT{b}")[1] <= min(span(simulation, f"0{op}{b}")[0] for op in ["X_UPDATE", *updates])


def test_all_ranks_wait_for_write_backs() -> None:
    loop = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=2, ranks=2, direct=True)
    simulation = simulate(loop.unroll(3))
    for b in range(3):
        assert span(simulation, f"0X_ACK{b}")[1] <= span(simulation, f"0X_FETCH{b}")[0]


@pytest.mark.parametrize("name", ["prefetch_depth", "read_ahead", "write_depth", "microbatches", "ranks"])
def test_depths_below_one_are_refused(name: str) -> None:
    depths = {"prefetch_depth": 1, "read_ahead": 1, "write_depth": 1, "microbatches": 1, "ranks": 1, name: 0}
    with pytest.raises(ScheduleError, match=f"{name} must be at least 1, got 0"):
        prefetch_loop(**depths)
