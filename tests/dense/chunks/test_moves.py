from __future__ import annotations

import pytest

from bagpipe.dense.chunks.moments import Moment, Trace, Use
from bagpipe.dense.chunks.moves import MovePlan, _swaps, _wanted, plan_moves
from bagpipe.errors import ScheduleError
from tests.dense.chunks.traces import fewest_fetches, layers_trace, random_trace


def check(plan: MovePlan, trace: Trace, walks: int = 3) -> None:
    """Walk a plan on contents: every use finds its chunk with what was written last, and slots suffice."""
    held, home, device = set(plan.starts[0]), dict[int, int](), dict[int, int]()
    latest: dict[int, int] = {}
    moves, clock = plan.by_moment(), 0
    for moment in range(walks * plan.num_batches * len(trace)):
        at = moment % (plan.num_batches * len(trace))
        batch, number = divmod(at, len(trace))
        if number == 0:
            assert held == plan.starts[batch]
        for move in moves.get(at, ()):
            if move.to == "host":
                held.remove(move.chunk)
                if move.copies:
                    home[move.chunk] = device.get(move.chunk, 0)
            else:
                assert move.chunk not in held
                held.add(move.chunk)
                device[move.chunk] = home.get(move.chunk, 0) if move.copies else -1
            assert len(held) <= plan.num_slots
        for use in trace[number].uses:
            clock += 1
            assert use.chunk in held
            if use.reads:
                assert device.get(use.chunk, 0) == latest.get(use.chunk, 0)
            if use.writes:
                device[use.chunk] = latest[use.chunk] = clock
    assert held == plan.starts[0]


def test_a_plan_has_the_fewest_fetches() -> None:
    """Of 300 random traces, each repeated: the queue's choice against every possible one."""
    for seed in range(300):
        trace, num_slots = random_trace(seed)
        swaps, residents = _swaps(trace, _wanted(trace, num_slots, 0), num_slots)
        num_batches = len(residents) - 1
        reads = [{use.chunk: use.reads for use in moment.uses} for moment in trace]
        fetched = sum(reads[swap.at % len(trace)][swap.comes] for swap in swaps)
        assert fetched == fewest_fetches(trace, num_slots, num_batches), seed


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_plan_keeps_what_was_written_and_the_budget(lookahead: int) -> None:
    for seed in range(300):
        trace, num_slots = random_trace(seed)
        check(plan_moves(trace, num_slots, lookahead=lookahead), trace)


def test_layers_that_fit_move_nothing() -> None:
    trace = layers_trace(4)
    plan = plan_moves(trace, 12)
    assert (plan.moves, plan.num_batches, plan.starts) == ((), 1, (frozenset(range(12)),))


def test_layers_that_do_not_fit_move_ahead_of_their_use() -> None:
    trace = layers_trace(6)
    plan = plan_moves(trace, 9, lookahead=1)
    check(plan, trace)
    needed = {chunk for moment in trace for chunk in moment.chunks}
    assert {move.chunk for move in plan.moves} < needed
    first_moments = plan.by_moment()
    assert any(
        move.to == "device" and move.chunk not in trace[moment % len(trace)].chunks
        for moment, moves in first_moments.items()
        for move in moves
    )


def test_a_moment_that_does_not_fit_is_refused() -> None:
    trace = [Moment("step 0", (Use(0), Use(1), Use(2)))]
    with pytest.raises(ScheduleError, match="step 0 uses 3 chunks, the device holds 2"):
        plan_moves(trace, 2)
