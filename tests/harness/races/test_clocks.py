"""Vector clocks: joining, advancing, copying."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.races.clocks import Clock

TIMES = st.dictionaries(st.integers(1, 4), st.integers(1, 9))


@settings(max_examples=40)
@given(TIMES, TIMES)
def test_a_join_is_the_union_of_both_clocks(mine: dict[int, int], theirs: dict[int, int]) -> None:
    clock, other = Clock(dict(mine)), Clock(dict(theirs))
    clock.join(other)
    assert clock.covers(other)
    assert clock.covers(Clock(mine))
    assert clock.limits(5).tolist() == [0, *(max(mine.get(agent, 0), theirs.get(agent, 0)) for agent in range(1, 5))]


def test_a_copy_is_independent() -> None:
    clock = Clock()
    assert [clock.advance(2), clock.advance(2)] == [1, 2]
    before = clock.copy()
    assert clock.advance(2) == 3
    assert clock.knows(2, 3)
    assert before.knows(2, 2)
    assert not before.knows(2, 3)
    assert clock.covers(before)
    assert not before.covers(clock)
