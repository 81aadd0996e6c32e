from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.eviction import NEVER, NEVER_PRIORITY, EvictionQueue, idle_priority
from bagpipe.oracle.lrfu import NO_SCORE, TICKS

operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.dictionaries(st.integers(0, 7), st.integers(1, 12), max_size=8)),
        st.tuples(st.just("pop"), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(operations)
def test_pops_the_highest_priorities_in_push_order(operations: list[tuple[str, object]]) -> None:
    # Some sequences are long enough for a sweep.
    queue = EvictionQueue(8)
    priorities: dict[int, int] = {}  # in the order of each slot's last push
    for verb, argument in operations:
        if isinstance(argument, dict):
            queue.push(np.array(list(argument), dtype=np.int64), np.array(list(argument.values()), dtype=np.int32))
            priorities = {slot: priority for slot, priority in priorities.items() if slot not in argument} | argument
        else:
            assert isinstance(argument, int), verb
            expected = sorted(priorities, key=lambda slot: -priorities[slot])[:argument]
            assert queue.pop(argument).tolist() == expected
            for slot in expected:
                del priorities[slot]
        assert queue.num_entries <= 4 * 8 + 8
        assert queue.is_queued(np.arange(8)).tolist() == [slot in priorities for slot in range(8)]


@pytest.mark.parametrize("moved", [[], range(0, 10_000, 3), range(9_990), range(10_000)])
def test_a_large_bucket_is_popped_piece_by_piece(moved: Sequence[int]) -> None:
    queue = EvictionQueue(10_000)
    queue.push(np.arange(10_000), np.full(10_000, 7, dtype=np.int32))
    queue.push(np.array(moved, dtype=np.int64), np.full(len(moved), 3, dtype=np.int32))
    expected = [*sorted(set(range(10_000)) - set(moved)), *moved]
    popped = [slot for count in (1, 2_500, 1, 5_000, 10_000) for slot in queue.pop(count).tolist()]
    assert popped == expected
    assert queue.num_entries == 0


def test_a_sweep_changes_nothing_but_the_number_of_entries() -> None:
    queue = EvictionQueue(5)
    queue.push(np.array([3, 1, 2]), np.full(3, 7, dtype=np.int32))
    queue.push(np.array([0]), np.array([7], dtype=np.int32))
    counts = []
    for priority in [5, 6] * 10:
        queue.push(np.array([4]), np.array([priority], dtype=np.int32))
        counts.append(queue.num_entries)
    assert min(counts[1:]) == 5 < max(counts) == 4 * 5 + 1
    assert queue.pop(5).tolist() == [3, 1, 2, 0, 4]


@pytest.mark.parametrize("one_priority", [True, False])
def test_few_entries_that_stay_keep_little_memory(one_priority: bool) -> None:
    """The last entry of each push stays: at the end of a chunk of its own priority, or as one of a lower priority."""
    queue = EvictionQueue(20_000)
    tracemalloc.start()
    try:
        for push in range(100):
            slots = np.arange(1_000) + push
            priorities = np.full(1_000, 9 + push, dtype=np.int32)
            priorities[-1] -= 0 if one_priority else 6 + push
            queue.push(slots, priorities)
            assert queue.pop(999).tolist() == slots[:-1].tolist()
        assert queue.num_entries == 100
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()


def test_priorities_up_to_the_current_batch_are_over() -> None:
    queue = EvictionQueue(3)
    queue.push(np.arange(3), np.array([4, 5, 6], dtype=np.int32))
    queue.advance(5)
    assert queue.is_queued(np.arange(3)).tolist() == [False, False, True]
    assert queue.pop(3).tolist() == [2]


def test_pop_respects_the_lowest_priority_asked_for() -> None:
    queue = EvictionQueue(4)
    queue.push(np.arange(4), np.array([2, 9, 7, NEVER_PRIORITY], dtype=np.int32))
    assert queue.pop(4, min_priority=7).tolist() == [3, 1, 2]
    assert queue.pop_idle().tolist() == []
    assert queue.pop(4).tolist() == [0]


def test_slots_among_others_are_found() -> None:
    queue = EvictionQueue(6)
    lists = [np.array(slots, dtype=np.int64) for slots in ([0, 1], [1, 2], [3], [], [0, 5])]
    for first in lists:
        for second in lists:
            assert queue.are_among(first, second).tolist() == [slot in second.tolist() for slot in first.tolist()]


def test_idle_rows_priority_above_all_others_lower_scores_higher() -> None:
    priorities = idle_priority(np.array([NO_SCORE, 4 * TICKS, 5 * TICKS, 1 << 30], dtype=np.int32)).tolist()
    assert priorities == sorted(priorities, reverse=True)
    assert len(set(priorities)) == 4
    assert NEVER_PRIORITY <= min(priorities) <= max(priorities) <= NEVER
