"""Plans of shards equal those of one process, whatever the number of shards and the assignment of tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.batch_indexer import BatchIndexer, IndexedBatch
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import CachePlan, FeatureRef, OracleSpec
from bagpipe.oracle.planner import Planner, make_planner, plan_batches, plans_of
from bagpipe.oracle.shard import MergedIndexer, ShardMerger, assign_tables, shard_features, shard_spec
from bagpipe.types.batch import Batch
from tests.oracle.batches import far_traces, make_batch, traces
from tests.oracle.plan_bytes import as_bytes


def sharded_plans(spec: OracleSpec, batches: Sequence[Batch], shard_of_table: Sequence[int]) -> list[CachePlan]:
    """Plans from the results of shards in this process."""
    return list(plans_of(sharded_planner(spec, batches, shard_of_table), batches))


def sharded_planner(
    spec: OracleSpec, batches: Sequence[Batch], shard_of_table: Sequence[int]
) -> Planner | DirectPlanner:
    """A planner with shards in this process; each sees its own features alone."""
    shards = []
    for shard in range(max(shard_of_table, default=0) + 1):
        tables = {table for table, its in enumerate(shard_of_table) if its == shard}
        features = list(shard_features(spec, tables))
        shards.append((BatchIndexer(shard_spec(spec, tables, features)), features))

    merger = ShardMerger(spec, shard_of_table)

    def merged(number: int) -> IndexedBatch:
        return merger.merge([shard.index(narrowed(batches[number], features)) for shard, features in shards])

    return make_planner(spec, MergedIndexer(spec, merged))


def narrowed(batch: Batch, features: list[int]) -> Batch:
    """The batch with some of its features."""
    starts = batch.feature_offsets()
    chosen = np.concatenate(
        [np.empty(0, dtype=np.int64), *(np.arange(starts[feature], starts[feature + 1]) for feature in features)]
    )
    return dataclasses.replace(
        batch,
        values=batch.values[chosen],
        lengths=batch.lengths[features].reshape(-1, batch.num_examples),
        next_use=None if batch.next_use is None else batch.next_use[chosen],
    )


@given(traces() | far_traces(), st.data())
def test_plans_of_shards_are_those_of_one_process(trace: tuple[OracleSpec, list[Batch]], data: st.DataObject) -> None:
    spec, batches = trace
    expected = [as_bytes(plan) for _, plan in plan_batches(batches, spec)]
    num_tables = len(spec.table_rows)
    shards = data.draw(st.lists(st.integers(0, 7), min_size=num_tables, max_size=num_tables))
    assert [as_bytes(plan) for plan in sharded_plans(spec, batches, shards)] == expected


def test_batches_that_arrive_late_have_the_plans_of_one_process() -> None:
    """The window is planned with what there is: rows leave it, lose their handles and come back."""
    spec = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=3, lookahead=8)
    rng = np.random.default_rng(5)
    batches = [make_batch(number, [[[i]] for i in rng.integers(0, 7, (1, 1)).tolist()[0]]) for number in range(60)]
    arrivals = rng.integers(1, 5, 40).tolist()
    expected = arriving(make_planner(spec), batches, arrivals)
    assert len(expected) == len(batches)
    assert arriving(sharded_planner(spec, batches, [0]), batches, arrivals) == expected


def arriving(planner: Planner | DirectPlanner, batches: Sequence[Batch], arrivals: list[int]) -> list[bytes]:
    """Plans of batches of which so many arrive at a time."""
    waiting, plans = iter(batches), []
    for number in arrivals:
        for batch in itertools.islice(waiting, number):
            planner.push(batch)
        for _ in range(number):
            with suppress(IndexError):
                plans.append(as_bytes(planner.plan(more_follow=True)))
    return plans


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("table_rows", [None, 5_000])
@pytest.mark.parametrize("assign", ["contiguous", "locality"])
def test_a_long_trace_that_evicts(num_shards: int, table_rows: int | None, assign: str) -> None:
    """Rows leave the window and the caches, and come back."""
    num_tables, lookahead = 9, 6
    rng = np.random.default_rng(3)
    batches = [
        make_batch(number, (rng.zipf(1.2, (num_tables, 60, 2)) % 4_999).tolist()) for number in range(5 * lookahead)
    ]
    spec = OracleSpec(
        table_rows=(table_rows,) * num_tables,
        features=tuple(FeatureRef(feature=table, table=table) for table in range(num_tables)),
        num_slots=700,
        lookahead=lookahead,
        world_size=3,
        assign=assign,
    )
    shards = assign_tables([1.0] * num_tables, num_shards)
    expected = [as_bytes(plan) for _, plan in plan_batches(batches, spec)]
    assert [as_bytes(plan) for plan in sharded_plans(spec, batches, shards)] == expected


def test_an_id_outside_its_table_has_the_tables_number() -> None:
    spec = OracleSpec(
        table_rows=(9, 9), features=tuple(FeatureRef(feature=n, table=n) for n in (0, 1)), num_slots=9, lookahead=1
    )
    with pytest.raises(InputError, match=r"batch 0, table number 1: expected ids in \[0, 9\), got 12"):
        sharded_plans(spec, [make_batch(0, [[[1]], [[12]]])], [0, 1])


@pytest.mark.parametrize(
    ("sizes", "num_shards", "expected"),
    [
        ([5, 1, 1, 1, 1, 1], 2, (0, 1, 1, 1, 1, 1)),
        ([1, 1, 1, 1], 2, (0, 0, 1, 1)),
        ([1, 1, 1, 1, 1], 2, (0, 0, 1, 1, 1)),
        ([9, 1, 9, 1], 2, (0, 0, 1, 1)),
        ([5, 5, 1, 4, 1], 2, (0, 1, 1, 0, 1)),
        ([0, 0, 0], 3, (0, 1, 2)),
        ([3, 2, 2], 1, (0, 0, 0)),
    ],
)
def test_neighbouring_tables_share_a_shard_where_that_is_as_even(
    sizes: list[float], num_shards: int, expected: tuple[int, ...]
) -> None:
    assert assign_tables(sizes, num_shards) == expected


def test_tables_that_are_assigned_already_count_first() -> None:
    assert assign_tables([4, 9, 3, 1], 2, {0: 1, 3: 1}) == (1, 0, 1, 1)
