from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.window import NextUses


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(st.integers(0, 9)), max_size=25), st.integers(1, 6))
def test_next_uses_are_those_of_the_batches_seen(batches: list[set[int]], lookahead: int) -> None:
    uses = NextUses(4)
    uses.grow(10)
    window: deque[tuple[int, list[int]]] = deque()

    def leave() -> None:
        index, handles = window.popleft()
        expected = [next((later for later, rows in window if h in rows), NEVER) for h in handles]
        assert uses.leave(np.array(handles, dtype=np.int64)).tolist() == expected, index

    for index, rows in enumerate(batches):
        handles = sorted(rows)
        unseen = [h for h in handles if not any(h in other for _, other in window)]
        assert uses.enter(np.array(handles, dtype=np.int64), index).tolist() == unseen
        window.append((index, handles))
        if len(window) == lookahead:
            leave()
    while window:
        leave()


def test_the_ring_grows_and_wraps() -> None:
    uses = NextUses(20_000)
    everything = np.arange(20_000)
    for index in range(4):
        uses.enter(everything, index)
    for index in range(50):
        assert (uses.leave(everything) == index + 1).all()
        uses.enter(everything, index + 4)
