from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import ExpiredRows
from data.replay import row_counter as module
from data.replay.row_counter import RowCounter
from tests.oracle.batches import make_batch

#: Features 0 and 2 read table 0, feature 1 reads table 1.
FEATURES = (FeatureRef(feature=0, table=0), FeatureRef(feature=2, table=0), FeatureRef(feature=1, table=1))
bags = st.lists(st.integers(0, 6), max_size=2)
logs = st.lists(st.lists(st.tuples(bags, bags, bags), min_size=1, max_size=4), min_size=1, max_size=5)


def spec_of(*table_rows: int | None) -> OracleSpec:
    return OracleSpec(table_rows=table_rows, features=FEATURES, num_slots=1, lookahead=1)


@given(logs, st.sampled_from([(7, 9), (None, 9), (None, None)]))
def test_every_row_is_numbered_and_counted_once(
    log: list[list[tuple[list[int], ...]]], table_rows: tuple[int | None, ...]
) -> None:
    counter = RowCounter(spec_of(*table_rows))
    uses: Counter[tuple[int, int]] = Counter()
    number_of: dict[tuple[int, int], int] = {}
    for index, examples in enumerate(log):
        batch = make_batch(index, [[example[feature] for example in examples] for feature in range(3)])
        ids = [
            (0 if feature != 1 else 1, row) for example in examples for feature in range(3) for row in example[feature]
        ]
        uses.update(ids)
        numbers = counter.take(batch)
        assert numbers.dtype == np.int32
        for row, number in zip(sorted(set(ids)), numbers.tolist(), strict=True):
            assert number_of.setdefault(row, len(number_of)) == number
        assert counter.rows_of(batch).tolist() == numbers.tolist()
        assert counter.num_rows == len(number_of)
    assert counter.rows_by_table().tolist() == [sum(table == wanted for table, _ in uses) for wanted in (0, 1)]
    for table, skew in enumerate(counter.skew(("first", "second"))):
        counts = sorted((count for (its, _), count in uses.items() if its == table), reverse=True)
        sizes = [len(example[feature]) for examples in log for example in examples for feature in ((0, 2), (1,))[table]]
        assert (skew.rows, skew.accesses) == (len(counts), sum(counts))
        assert skew.missing == pytest.approx(sizes.count(0) / len(sizes))
        assert skew.singletons == pytest.approx(counts.count(1) / max(1, len(counts)))
        if counts:
            assert skew.top_0_1 == pytest.approx(counts[0] / sum(counts))
            assert skew.curve[-1] == (1.0, 1.0)


def test_a_curve_has_few_points_and_rises() -> None:
    counter = RowCounter(OracleSpec(table_rows=(None,), features=FEATURES[:1], num_slots=1, lookahead=1))
    rng = np.random.default_rng(1)
    ids = (5000 * rng.random(20_000) ** 4).astype(int)
    counter.take(make_batch(0, [[[int(row)] for row in ids]]))
    (skew,) = counter.skew(("t",))
    counts = np.sort(np.bincount(ids))[::-1]
    counts = counts[counts > 0]
    assert skew.rows == len(counts) > module.CURVE_POINTS >= len(skew.curve)
    assert skew.top_1 == counts[: -(-len(counts) // 100)].sum() / 20_000
    assert skew.top_10 == counts[: -(-len(counts) // 10)].sum() / 20_000
    assert list(skew.curve) == sorted(skew.curve)


def test_memory_follows_the_distinct_rows() -> None:
    counter = RowCounter(spec_of(None, None))
    batch = make_batch(0, [[[1], [2]], [[3], []], [[4], [1]]])
    for _ in range(50):
        counter.take(batch)
    assert counter.num_rows == 4
    assert counter._uses.shape == counter._tables.shape == (1024,)


def test_more_rows_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    counter = RowCounter(spec_of(None, None))
    with pytest.raises(InputError, match="at most 3 distinct rows"):
        counter.take(make_batch(0, [[[1, 2]], [[3, 4]], [[]]]))


def test_expired_rows_have_their_numbers() -> None:
    counter = RowCounter(spec_of(7, None))
    counter.take(make_batch(0, [[[5]], [[8, 3]], [[2]]]))  # rows 2 and 5 of table 0, then 3 and 8 of table 1
    batch = make_batch(1, [[[5]], [[]], [[]]])
    assert counter.expired(batch).tolist() == []
    gone = (ExpiredRows(features=(0, 2), ids=np.array([5])), ExpiredRows(features=(1,), ids=np.array([3])))
    assert counter.expired(dataclasses.replace(batch, expired=gone)).tolist() == [1, 2]
