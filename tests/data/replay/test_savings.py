"""Savings of thresholds and limits against counts in plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.expiry import CLOCKS, ExpiryUnit
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, Table
from data.replay.savings import SavingsCounter, Tried
from tests.oracle.batches import make_batch

#: Features 0 and 2 read table `item`, feature 1 reads `user`.
TABLES = ("item", "user", "item")
FEATURES = tuple(Feature(name=str(number), table=table) for number, table in enumerate(TABLES))
ROW_BYTES = {"item": 8, "user": 3}
bags = st.lists(st.integers(0, 6), max_size=2)
logs = st.lists(st.lists(st.tuples(bags, bags, bags), min_size=1, max_size=3), min_size=1, max_size=12)


def schema_of(item_rows: int | None) -> DataSchema:
    tables = (Table(name="item", rows=item_rows), Table(name="user", rows=9))
    return DataSchema(label="y", dense=(), features=FEATURES, tables=tables)


def batches_of(log: list[list[tuple[list[int], ...]]]) -> list[Batch]:
    return [
        make_batch(number, [[example[feature] for example in examples] for feature in range(3)])
        for number, examples in enumerate(log)
    ]


def rows_of(examples: list[tuple[list[int], ...]]) -> list[tuple[str, int]]:
    return [(table, row) for example in examples for table, bag in zip(TABLES, example, strict=True) for row in bag]


def counted(schema: DataSchema, batches: list[Batch], tried: Tried) -> SavingsCounter:
    counter = SavingsCounter(schema, ROW_BYTES, tried)
    for batch in batches:
        counter.add(batch)
    return counter


@settings(max_examples=50)
@given(logs, st.sampled_from([None, 7]), st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))
def test_thresholds(log: list[list[tuple[list[int], ...]]], item_rows: int | None, thresholds: list[int]) -> None:
    tried = Tried(thresholds=tuple(thresholds))
    found = counted(schema_of(item_rows), batches_of(log), tried).found().thresholds
    assert [each.min_uses for each in found] == thresholds
    uses = Counter(row for examples in log for row in rows_of(examples))
    for each in found:
        so_far: Counter[tuple[str, int]] = Counter()
        before = Counter[str]()
        for examples in log:
            so_far.update(rows_of(examples))
            before.update(table for table, row in rows_of(examples) if so_far[table, row] < each.min_uses)
        rows = Counter(table for (table, _), count in uses.items() if count >= each.min_uses)
        for table, counts in each.tables.items():
            distinct = sum(name == table for name, _ in uses)
            assert (counts.rows, counts.bytes) == (rows[table], rows[table] * ROW_BYTES[table])
            assert counts.rows_saved == counts.bytes_saved == (1 - rows[table] / distinct if distinct else 0)
            assert (counts.uses, counts.default_uses) == (
                sum(count for (name, _), count in uses.items() if name == table),
                before[table],
            )
        assert (each.total.rows, each.total.default_uses) == (rows.total(), before.total())
        whole = sum(ROW_BYTES[table] for table, _ in uses)
        assert each.total.bytes == sum(rows[table] * size for table, size in ROW_BYTES.items())
        assert each.total.bytes_saved == (1 - each.total.bytes / whole if whole else 0)
        assert each.total.default_share == before.total() / max(1, uses.total())


@settings(max_examples=50)
@given(
    logs,
    st.sampled_from([None, 7]),
    st.lists(st.sampled_from([0.5, 3, 6, 100]), min_size=1, max_size=3, unique=True),
    st.sampled_from(["examples", "steps"]),
    st.integers(1, 3),
)
def test_limits(
    log: list[list[tuple[list[int], ...]]], item_rows: int | None, limits: list[float], unit: ExpiryUnit, every: int
) -> None:
    batches = batches_of(log)
    tried = Tried(limits=tuple(limits), unit=unit, every=every)
    found = counted(schema_of(item_rows), batches, tried).found().limits
    clock = CLOCKS[unit]()
    clocks = [clock(batch) for batch in batches]
    for each in found:
        assert (each.unit, each.every) == (unit, every)
        last: dict[tuple[str, int], int] = {}
        ever: set[tuple[str, int]] = set()
        deleted, anew = Counter[str](), Counter[str]()
        alive: list[Counter[str]] = []
        for number, examples in enumerate(log):
            if number % every == 0:
                gone = {
                    row
                    for row, use in last.items()
                    if number - use >= LEAST_GAP and clocks[number] - clocks[use] > each.expire_after
                }
                deleted.update(table for table, _ in gone)
                last = {row: use for row, use in last.items() if row not in gone}
            rows = set(rows_of(examples))
            anew.update(table for table, row in rows if (table, row) in ever and (table, row) not in last)
            ever |= rows
            last |= dict.fromkeys(rows, number)
            alive.append(Counter(table for table, _ in last))
        for table, counts in each.tables.items():
            most = max(now[table] for now in alive)
            assert asdict(counts) == {
                "rows_at_end": alive[-1][table],
                "rows_at_most": most,
                "rows_deleted": deleted[table],
                "rows_born_anew": anew[table],
                "bytes_at_most": most * ROW_BYTES[table],
            }
        assert asdict(each.total) == {
            "rows_at_end": alive[-1].total(),
            "rows_at_most": max(now.total() for now in alive),
            "rows_deleted": deleted.total(),
            "rows_born_anew": anew.total(),
            "bytes_at_most": max(sum(now[table] * size for table, size in ROW_BYTES.items()) for now in alive),
        }


def test_days_need_times() -> None:
    batch = make_batch(0, [[[1]], [[2]], [[3]]])
    with pytest.raises(InputError, match="days needs a clock: expected a time of every example, got none"):
        counted(schema_of(None), [batch], Tried(limits=(1.0,), unit="days"))
    counter = counted(schema_of(None), [batch], Tried(thresholds=(2,), unit="days"))  # nothing asks for the time
    assert counter.found().thresholds[0].total.default_uses == 3


def test_no_id_is_no_saving() -> None:
    empty = make_batch(0, [[[]], [[]], [[]]])
    found = counted(schema_of(None), [empty], Tried(thresholds=(2,), limits=(1.0,))).found()
    assert np.all([value == 0 for value in asdict(found.thresholds[0].total).values()])
    assert np.all([value == 0 for value in asdict(found.limits[0].total).values()])
