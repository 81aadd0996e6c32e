from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.plan import NO_BATCH
from bagpipe.oracle.window import NextUses, RankCounts, UnseenUses


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
        assert uses.repeated().tolist() == [bool(window) and h in window[-1][1] for h in handles]
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
        assert uses.repeated().all()


@given(
    st.lists(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 10), min_size=1)), max_size=25),
    st.integers(1, 6),
    st.sampled_from([3, 11]),
)
def test_uses_by_rank_are_counted_from_a_batch_on(
    batches: list[dict[int, set[int]]], lookahead: int, world_size: int
) -> None:
    """Each batch maps a row to the ranks that use it."""
    # A counter wraps around long before the batches end.
    counts = RankCounts(world_size, largest=lookahead)
    uses = NextUses(10, num_count_words=counts.num_words)
    window: deque[list[tuple[int, set[int]]]] = deque()

    def leave() -> None:
        rows = window.popleft()
        handles = np.array([row for row, _ in rows], dtype=np.int64)
        later = counts.unpack(uses.later_counts(handles, np.arange(len(rows))[::2]))
        assert later.tolist() == [
            [
                sum(rank in ranks for batch in window for other, ranks in batch if other == row)
                for rank in range(world_size)
            ]
            for row, _ in rows[::2]
        ]
        uses.leave(handles)

    for index, batch in enumerate(batches):
        rows = [(row, {rank % world_size for rank in ranks}) for row, ranks in sorted(batch.items())]
        of_ranks = [
            np.array([u for u, (_, ranks) in enumerate(rows) if rank in ranks], dtype=np.int32)
            for rank in range(world_size)
        ]
        uses.enter(np.array([row for row, _ in rows], dtype=np.int64), index, counts.of(of_ranks, len(rows)))
        window.append(rows)
        if len(window) == lookahead:
            leave()


@pytest.mark.parametrize(("largest", "words"), [(200, 2), (255, 2), (256, 3), (70_000, 5)])
def test_counters_are_as_wide_as_the_window_asks_for(largest: int, words: int) -> None:
    counts = RankCounts(9, largest=largest)
    assert counts.num_words == words
    one = counts.of([np.arange(1, dtype=np.int32)] * 8 + [np.empty(0, dtype=np.int32)], 1)
    total, before = one.copy(), one.copy()
    for _ in range(largest):
        total += one
    assert counts.unpack(total - before).tolist() == [[largest] * 8 + [0]]


def test_counts_survive_the_growth_of_the_ring() -> None:
    counts = RankCounts(2, largest=9)
    uses = NextUses(20_000, num_count_words=counts.num_words)
    everything = np.arange(20_000)
    for index in range(6):
        uses.enter(
            everything, index, counts.of([everything.astype(np.int32), everything[::2].astype(np.int32)], 20_000)
        )
    assert counts.unpack(uses.later_counts(everything, np.array([0, 1, 19_998]))).tolist() == [[5, 5], [5, 0], [5, 5]]


@pytest.mark.parametrize(
    ("lookahead", "planned", "latest"),
    [
        # batch, last batch in its window -> the latest batch whose window did not show the batch
        (3, [(0, 2), (1, 3), (2, 4), (3, 5), (4, 5), (5, 5)], [NO_BATCH, NO_BATCH, NO_BATCH, 0, 1, 2]),
        (3, [(0, 0), (1, 2), (2, 2), (3, 5)], [NO_BATCH, 0, 0, 2]),
        (1, [(7, 7), (8, 8)], [6, 7]),
        (9, [(0, 1), (1, 1), (2, 9), (3, 9)], [NO_BATCH, NO_BATCH, 1, 1]),
    ],
)
def test_rows_that_leave_unseen(lookahead: int, planned: list[tuple[int, int]], latest: list[int]) -> None:
    unseen = UnseenUses(lookahead)
    found = []
    for batch_index, last_index in planned:
        unseen.plan(batch_index, last_index)
        found.append(unseen.latest)
    assert found == latest
