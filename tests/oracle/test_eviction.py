from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.oracle.eviction import NEVER, NEVER_RANK, EvictionQueue, idle_rank
from bagpipe.oracle.worth import NO_WORTH, TICKS

operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.dictionaries(st.integers(0, 7), st.integers(1, 12), max_size=8)),
        st.tuples(st.just("pop"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_pops_the_highest_ranks_whatever_was_pushed_over(story: list[tuple[str, object]]) -> None:
    queue = EvictionQueue(8)
    ranks: dict[int, int] = {}
    for verb, argument in story:
        if isinstance(argument, dict):
            queue.push(np.array(list(argument), dtype=np.int64), np.array(list(argument.values()), dtype=np.int32))
            ranks.update(argument)
        else:
            assert isinstance(argument, int), verb
            popped = queue.pop(argument).tolist()
            assert len(popped) == len(set(popped)) == min(argument, len(ranks))
            expected = sorted(ranks.values(), reverse=True)[: len(popped)]
            assert [ranks.pop(slot) for slot in popped] == expected
        assert queue.num_entries <= 4 * 8 + 8
        assert queue.is_queued(np.arange(8)).tolist() == [slot in ranks for slot in range(8)]


def test_ranks_up_to_the_current_batch_are_over() -> None:
    queue = EvictionQueue(3)
    queue.push(np.arange(3), np.array([4, 5, 6], dtype=np.int32))
    queue.advance(5)
    assert queue.is_queued(np.arange(3)).tolist() == [False, False, True]
    assert queue.pop(3).tolist() == [2]


def test_pop_respects_the_lowest_rank_asked_for() -> None:
    queue = EvictionQueue(4)
    queue.push(np.arange(4), np.array([2, 9, 7, NEVER_RANK], dtype=np.int32))
    assert queue.pop(4, min_rank=7).tolist() == [3, 1, 2]
    assert queue.pop_idle().tolist() == []
    assert queue.pop(4).tolist() == [0]


def test_slots_in_both_are_found_whatever_was_asked_before() -> None:
    queue = EvictionQueue(6)
    lists = [np.array(slots, dtype=np.int64) for slots in ([0, 1], [1, 2], [3], [], [0, 5])]
    for first in lists:
        for second in lists:
            assert queue.any_in_both(first, second) == bool(set(first.tolist()) & set(second.tolist()))


def test_idle_rows_rank_above_all_others_those_worth_less_higher() -> None:
    ranks = idle_rank(np.array([NO_WORTH, 4 * TICKS, 5 * TICKS, 1 << 30], dtype=np.int32)).tolist()
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == 4
    assert NEVER_RANK <= min(ranks) <= max(ranks) <= NEVER
