"""Last uses of a log's rows, against a dictionary, and against the rows that expire by the same limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.last_uses import LastUses
from bagpipe.oracle.lifetimes import LEAST_GAP, RowLifetimes
from tests.oracle.test_lifetimes import rows

#: Batches: ids of a bounded and of an unbounded table, and the time since the batch before.
LOGS = st.lists(
    st.tuples(st.sets(st.integers(0, 6)), st.sets(st.integers(-3, 3)), st.integers(0, 3)), min_size=1, max_size=30
)


@pytest.mark.parametrize("sizes", [(7, None), (7, 7)], ids=["hashed", "dense"])
@given(log=LOGS, limit=st.integers(1, 12))
def test_ages_are_those_of_the_log(sizes: tuple[int | None, ...], log: list[tuple[set[int], ...]], limit: int) -> None:
    uses, lives = LastUses(sizes), RowLifetimes(sizes, [float(limit)] * 2, [None, None])
    clock, last, alive, clocks = 0.0, {}, set(), []
    for number, (first, second, pause) in enumerate(log):
        second = second if sizes[1] is None else {abs(one) for one in second}
        clock += pause  # type: ignore[assignment]
        used = rows(sorted(first), sorted(second, key=lambda one: one % 2**64))
        uses.use(used, clock)
        lives.begin(clock)
        lives.use(used)
        clocks.append(clock)
        last |= {(0, one): number for one in first} | {(1, one): number for one in second}
        alive |= {*last}
    assert uses.num_batches == len(log)
    # The batch after the log, at the same time: what expires before it is what is not kept.
    lives.begin(clock)
    expired = lives.pop_expired()
    gone = {
        (table, one)
        for table, (start, stop) in enumerate(itertools.pairwise(expired.table_offsets.tolist()))
        for one in expired.ids[start:stop].tolist()
    }
    for table, size in enumerate(sizes):
        ids = np.arange(0 if size else -3, 7 if size else 4)
        ages = dict(zip(ids.tolist(), uses.ages(table, ids, clock).tolist(), strict=True))
        kept = dict(zip(ids.tolist(), uses.is_kept(table, ids, clock, limit).tolist(), strict=True))
        is_used = dict(zip(ids.tolist(), uses.is_used(table, ids).tolist(), strict=True))
        for one in ids.tolist():
            then = last.get((table, one))
            assert is_used[one] == (then is not None)
            assert ages[one] == clock - clocks[then or 0]
            if then is not None:
                is_recent = len(log) - then < LEAST_GAP
                assert kept[one] == (is_recent or ages[one] <= limit) == ((table, one) not in gone)


def test_a_row_without_a_use_is_as_old_as_the_log() -> None:
    uses = LastUses([None])
    assert uses.ages(0, np.array([5]), 3.0).tolist() == [0.0]
    for clock in (2.0, 4.0):
        uses.use(rows([1]), clock)
    assert uses.ages(0, np.array([5, 1]), 9.0).tolist() == [7.0, 5.0]
    assert uses.is_kept(0, np.array([5, 1]), 9.0, 6.0).tolist() == [False, True]
