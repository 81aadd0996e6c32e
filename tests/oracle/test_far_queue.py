from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.eviction import NEVER, NEVER_PRIORITY
from bagpipe.oracle.far_queue import FarQueue, far_priority

BATCHES = st.integers(0, 300) | st.integers(4_000, 4_200) | st.sampled_from([64, 4_095, 4_096, 300_000, NEVER])
PUSHES = st.dictionaries(st.integers(0, 7), BATCHES, max_size=8)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("idle"), PUSHES),
            st.tuples(st.just("near"), st.dictionaries(st.integers(0, 7), st.integers(1, 12), max_size=8)),
            st.tuples(st.just("pop"), st.integers(0, 5)),
            st.tuples(st.just("pop idle"), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_pops_the_highest_priorities_first(operations: list[tuple[str, object]]) -> None:
    queue = FarQueue(8)
    priorities: dict[int, int] = {}
    for verb, argument in operations:
        if isinstance(argument, dict):
            values = np.array(list(argument.values()), dtype=np.int32)
            values = far_priority(values) if verb == "idle" else values
            queue.push(np.array(list(argument), dtype=np.int64), values)
            priorities |= dict(zip(argument, values.tolist(), strict=True))
        else:
            assert isinstance(argument, int), verb
            least = NEVER_PRIORITY if verb == "pop idle" else 0
            expected = sorted((value for value in priorities.values() if value >= least), reverse=True)[:argument]
            popped = queue.pop(argument, least).tolist()
            assert [priorities.pop(slot) for slot in popped] == expected
        assert queue.num_entries <= 4 * 8 + 8
        assert queue.is_queued(np.arange(8)).tolist() == [slot in priorities for slot in range(8)]


def test_a_push_makes_a_bucket_for_thousands_of_batches() -> None:
    queue = FarQueue(20_000)
    queue.push(np.arange(20_000), far_priority(np.arange(20_000, dtype=np.int32)))
    assert len(queue._wide) == 5
    assert queue.pop(3).tolist() == [19_999, 19_998, 19_997]
    assert len(queue._wide) < 5 + 4_096 // 64
    assert queue.pop(20_000).tolist() == list(range(19_996, -1, -1))
    assert queue.num_entries == 0


def test_a_sweep_keeps_the_order() -> None:
    queue = FarQueue(4)
    queue.push(np.array([0, 1, 2]), far_priority(np.array([70, 5_000, 69], dtype=np.int32)))
    for batch in range(40):
        queue.push(np.array([3]), far_priority(np.array([batch], dtype=np.int32)))
    assert queue.num_entries <= 4 * 4 + 1
    assert queue.pop(4).tolist() == [1, 0, 2, 3]


def test_a_pop_of_idle_rows_leaves_the_others() -> None:
    queue = FarQueue(4)
    queue.push(np.array([0, 1]), np.array([3, 9], dtype=np.int32))
    queue.push(np.array([2, 3]), far_priority(np.array([0, NEVER], dtype=np.int32)))
    assert queue.pop_idle().tolist() == [3, 2]
    assert queue.pop(4).tolist() == [1, 0]


def test_priorities_are_those_of_idle_rows_in_the_order_of_next_uses() -> None:
    found = far_priority(np.array([-1, 0, 1, (1 << 30) - 2, (1 << 30) + 5, NEVER], dtype=np.int32))
    assert found.dtype == np.int32
    assert found.min() >= NEVER_PRIORITY
    assert (np.diff(found) >= 0).all()
