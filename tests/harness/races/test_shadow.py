"""The shadow compared with a full record of accesses: the first race of a cell is found, and none is invented."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.races.clocks import Clock
from tests.harness.races.shadow import CELL_BYTES, Shadow

NUM_CELLS = 6
AGENTS = (1, 2, 3)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """Random steps (kind, agent, a, b): accesses of cells a to b, and waits of an agent for agent a."""
    agent, cell = st.sampled_from(AGENTS), st.integers(0, NUM_CELLS - 1)
    access = st.tuples(st.sampled_from(["read", "write"]), agent, cell, cell).map(
        lambda parts: (parts[0], parts[1], min(parts[2:]), max(parts[2:]))
    )
    wait = st.tuples(st.just("wait"), agent, agent, st.just(0))
    return draw(st.lists(access | wait, max_size=25))


@given(programs())
def test_races_are_those_of_a_full_record(program: list[tuple[str, int, int, int]]) -> None:
    """Up to the first race; after it, the order of an access is undefined."""
    shadow, clocks = Shadow(NUM_CELLS * CELL_BYTES), {agent: Clock() for agent in AGENTS}
    record: list[tuple[int, int, bool, range]] = []
    for what, agent, first, last in program:
        clock = clocks[agent]
        if what == "wait":
            clock.join(clocks[first])
            continue
        time, writes, cells = clock.advance(agent), what == "write", range(first, last + 1)
        found = shadow.note(slice(first, last + 1), agent, time, clock, 4, writes=writes)
        wrong = {
            (other, wrote)
            for other, then, wrote, theirs in record
            if (writes or wrote) and set(cells) & set(theirs) and not clock.knows(other, then)
        }
        # Not all of them: a later access can hide an earlier one that it is ordered after.
        reported = {(other, wrote) for other, _, wrote in found}
        assert reported <= wrong
        assert bool(reported) == bool(wrong)
        if wrong:
            return
        record.append((agent, time, writes, cells))


def test_cells_can_be_listed_and_repeated() -> None:
    shadow, known = Shadow(40), Clock({1: 1})
    shadow.note(np.array([1, 5, 5]), 1, 1, known, 3, writes=True)
    assert shadow.note(np.array([0, 2, 4]), 2, 1, Clock({2: 1}), 3, writes=True) == ()
    assert shadow.note(np.array([5, 4]), 2, 2, Clock({2: 2}), 3, writes=False) == ((1, 1, True),)
