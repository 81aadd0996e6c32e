"""Born and expired rows against a brute-force walk over the log."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.expiry import ExpiryRules, ExpiryUnit
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.types.batch import Batch
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID, DataSchema, Feature, Table
from tests.oracle.batches import make_batch, with_lives

TABLES = ("a", "b", "a")


def schema_of(rows: int | None) -> DataSchema:
    """Two features share table a; table b has one, and a default row."""
    return DataSchema(
        label="label",
        dense=(),
        features=tuple(Feature(name=str(n), table=table) for n, table in enumerate(TABLES)),
        tables=(Table(name="a", rows=rows), Table(name="b", rows=rows, absent="default")),
    )


logs = st.integers(1, 3).flatmap(
    lambda size: st.lists(
        st.lists(
            st.lists(st.lists(st.integers(0, 6), max_size=2), min_size=size, max_size=size), min_size=3, max_size=3
        ),
        max_size=20,
    )
)


def rows_of(batch: Batch) -> list[tuple[str, int]]:
    """Table and id of each occurrence."""
    features = np.repeat(np.arange(batch.num_features), np.diff(batch.feature_offsets()))
    return [(TABLES[n], i) for n, i in zip(features.tolist(), batch.values.tolist(), strict=True)]


@pytest.mark.parametrize("rows", [7, None])
@given(
    log=logs,
    limits=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 9)),
    unit=st.sampled_from(["steps", "examples", "days"]),
    every=st.sampled_from([1, 1, 3]),
    days=st.lists(st.integers(0, 6), min_size=20, max_size=20),
)
def test_rows_are_born_and_expire_as_the_log_says(
    rows: int | None,
    log: list[list[list[list[int]]]],
    limits: dict[str, int],
    unit: ExpiryUnit,
    every: int,
    days: list[int],
) -> None:
    default = UNBOUNDED_DEFAULT_ID if rows is None else rows
    batches, clocks, examples, today = [], [], 0, 0
    for index, bags in enumerate(log):
        lasting = [bags[0], [[default if i == 6 else i for i in bag] for bag in bags[1]], bags[2]]
        batch = make_batch(index, lasting)
        today = max(today, days[index])
        clocks.append({"steps": index, "examples": examples, "days": today}[unit])
        examples += batch.num_examples
        batches.append(dataclasses.replace(batch, times_s=np.full(batch.num_examples, days[index] * 86_400)))
    last_use: dict[tuple[str, int], int] = {}
    for batch in with_lives(schema_of(rows), ExpiryRules(limits=limits, unit=unit, every=every), batches):
        now = batch.index
        expired = {
            row
            for row, then in last_use.items()
            if row[0] in limits
            and now % every == 0
            and row != ("b", default)
            and now - then >= LEAST_GAP
            and clocks[now] - clocks[then] > limits[row[0]]
        }
        if expired:
            found = [(table, i) for table, gone in zip("ab", batch.expired, strict=True) for i in gone.ids.tolist()]
            assert found == sorted(expired, key=lambda row: (row[0], row[1] % 2**64))
            assert [gone.features for gone in batch.expired] == [(0, 2), (1,)]
        else:
            assert batch.expired == ()
        for row in expired:
            del last_use[row]
        used = rows_of(batch)
        assert batch.is_born is not None
        assert batch.is_born.tolist() == [row not in last_use for row in used]
        last_use.update(dict.fromkeys(used, now))


@pytest.mark.parametrize("ids", [[7], [-1]])
def test_an_id_outside_its_table_is_refused(ids: list[int]) -> None:
    batch = make_batch(0, [[ids], [[]], [[]]])
    with pytest.raises(InputError, match=rf"batch 0, table 'a': expected ids in \[0, 7\), got {ids[0]}"):
        with_lives(schema_of(7), ExpiryRules(limits={"a": 3}, unit="steps"), [batch])


def test_days_need_times() -> None:
    with pytest.raises(InputError, match="needs a clock"):
        with_lives(schema_of(7), ExpiryRules(limits={"a": 3}, unit="days"), [make_batch(0, [[[1]], [[]], [[]]])])


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(InputError, match=r"data\.expire_after_by_table names table 'c', the data has a, b"):
        ExpiryRules(limits={"c": 3}, unit="steps").check(schema_of(7))
