"""Expired rows in plans, of all ranks, with caches and without."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from bagpipe.errors import InputError
from bagpipe.oracle.expired import split_expired
from bagpipe.oracle.expiry import ExpiryRules
from bagpipe.oracle.plan import FeatureRef, OracleSpec, RowList
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.verify import verify
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, Table
from tests.oracle.batches import make_batch, mortal_traces, with_lives


@given(mortal_traces())
def test_every_plan_is_valid_if_rows_expire(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    assert verify(plan_batches(batches, spec), spec).num_batches == len(batches)


def test_a_row_that_expires_in_the_cache_leaves_it_unwritten_and_begins_anew() -> None:
    """`a` expires at batch 6 (last use at 0, limit 5) while the window holds its use at 7; `x` goes at batch 8."""
    spec = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=9, lookahead=4)
    schema = DataSchema(
        label="label", dense=(), features=(Feature(name="f", table="t"),), tables=(Table(name="t", rows=None),)
    )
    log = [make_batch(n, [[[ord(letter)]]]) for n, letter in enumerate("axbcbcbacb")]
    batches = with_lives(schema, ExpiryRules(limits={"t": 5}, unit="steps", every=2), log)
    found = [
        "".join(f"-{chr(i)}" for i in owner.evict.ids)
        + "".join(f"!{chr(i)}" for i in (() if owner.expired is None else owner.expired.ids))
        + "".join(f"{'*' if new else '+'}{chr(i)}" for i, new in zip(owner.fetch.ids, owner.fetch_new, strict=True))
        for _, plan in plan_batches(batches, spec)
        for owner in plan.owners
    ]
    assert found == ["*a", "*x", "*b", "*c", "", "", "!a", "*a", "!x", ""]


def test_deletions_are_spread_over_the_ranks() -> None:
    spec = OracleSpec(
        table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=6, lookahead=1, world_size=3
    )
    expired = RowList(table_offsets=np.array([0, 900]), ids=np.arange(900))
    slots = np.full(900, -1)
    slots[5] = 2 * spec.slots_per_rank + 3
    found = split_expired(expired, slots, spec)
    assert sorted(i for rank in found for i in rank.rows.ids.tolist()) == list(range(900))
    assert min(len(rank.rows) for rank in found) > 200
    owner = found[2]
    assert owner.slots[owner.rows.ids == 5].tolist() == [3]
    assert sum(int((rank.slots >= 0).sum()) for rank in found) == 1


def test_a_table_of_several_tables_of_the_data_is_refused() -> None:
    """A row of it could expire by one of them while the other still uses it."""
    spec = OracleSpec(
        table_rows=(None,),
        features=(FeatureRef(feature=0, table=0), FeatureRef(feature=1, table=0)),
        num_slots=9,
        lookahead=1,
    )
    schema = DataSchema(
        label="label",
        dense=(),
        features=(Feature(name="x", table="a"), Feature(name="y", table="b")),
        tables=(Table(name="a"), Table(name="b")),
    )
    batches = [make_batch(n, [[[n]], [[1]]]) for n in range(9)]
    batches = with_lives(schema, ExpiryRules(limits={"a": 2}, unit="steps"), batches)
    with pytest.raises(InputError, match=r"expected features of one table of the data with data\.expire_after"):
        list(plan_batches(batches, spec))
