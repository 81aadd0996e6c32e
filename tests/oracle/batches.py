"""Random batches for tests of the oracle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from bagpipe.oracle.expiry import ExpiryRules, ExpiryUnit, RowExpiry
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import NO_USE, Batch
from bagpipe.types.schema import DataSchema, Feature, Table

#: Ids with edge-case bit patterns of 64-bit integers.
WIDE_IDS = [0, 1, 2, -1, -2, 2**63 - 1, -(2**63), 2**45, 2**50 + 3, 2**50 + 4]


def make_batch(index: int, bags: Sequence[Sequence[Sequence[int]]]) -> Batch:
    """A batch from ``bags[feature][example] = [ids]``."""
    num_examples = len(bags[0])
    return Batch(
        index=index,
        dense=np.zeros((num_examples, 0), dtype=np.float32),
        values=np.array([i for feature in bags for bag in feature for i in bag], dtype=np.int64),
        lengths=np.array([[len(bag) for bag in feature] for feature in bags], dtype=np.int32).reshape(
            len(bags), num_examples
        ),
        labels=np.zeros(num_examples, dtype=np.float32),
    )


@st.composite
def traces(draw: st.DrawFn, *, max_batches: int = 14, max_ranks: int = 5) -> tuple[OracleSpec, list[Batch]]:
    """A spec (ranks and their shares, lookahead, policy, number of slots from the smallest possible) and its batches.

    Ranks bring their own examples if the spec says so. Batches can have fewer examples than ranks, ranks can see no id
    of a table, and the last batch can be smaller.
    """
    num_features = draw(st.integers(1, 3))
    wide = draw(st.booleans())
    ids = st.sampled_from(WIDE_IDS) if wide else st.integers(0, draw(st.sampled_from([3, 9, 40])))
    bag = st.lists(ids, max_size=3)
    num_examples = draw(st.integers(1, 9))
    feature = st.lists(bag, min_size=num_examples, max_size=num_examples)
    runs = draw(st.lists(st.lists(feature, min_size=num_features, max_size=num_features), max_size=max_batches))
    if runs:
        last = draw(st.integers(1, num_examples))
        runs[-1] = [bags[:last] for bags in runs[-1]]
    batches = [make_batch(index, bags) for index, bags in enumerate(runs)]
    # Two features can share a table; a feature can feed two tables.
    tables = sorted(draw(st.lists(st.integers(0, 2), min_size=num_features, max_size=num_features)))
    refs = [FeatureRef(feature=feature, table=table) for feature, table in enumerate(tables)]
    if draw(st.booleans()):
        refs.append(FeatureRef(feature=0, table=3))
    num_tables = max(ref.table for ref in refs) + 1
    largest = max([len({(r.table, i) for r in refs for b in bags[r.feature] for i in b}) for bags in runs], default=0)
    world_size = draw(st.integers(1, max_ranks))
    rows_delay = draw(st.sampled_from([0, 1]))
    per_rank = -(-largest * (1 + rows_delay) // world_size)
    assign = draw(st.sampled_from(["contiguous", "locality", "own"]))
    if assign == "own":
        batches = [with_rank_examples(draw, batch, world_size) for batch in batches]
    share = st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size).filter(any)
    shares = draw(st.just([]) | share) if assign == "contiguous" else []
    num_slots = draw(st.sampled_from([0, max(per_rank, 1), per_rank + 1, per_rank + 3, 2 * per_rank + 2, 200]))
    spec = OracleSpec(
        table_rows=(None if wide else 41,) * num_tables,
        features=tuple(refs),
        num_slots=num_slots,
        grows=bool(num_slots) and draw(st.booleans()),
        lookahead=draw(st.sampled_from([1, 2, 3, 8, 64])),
        policy=draw(st.sampled_from(["belady-window", "drop-unused"])),
        world_size=world_size,
        assign=assign,
        example_shares=tuple(shares),
        rows_delay=rows_delay,
    )
    return spec, batches


@st.composite
def far_traces(draw: st.DrawFn) -> tuple[OracleSpec, list[Batch]]:
    """As `traces`, with the horizon `log`; batches tell next uses, true ones or any numbers."""
    spec, batches = draw(traces())
    spec = dataclasses.replace(spec, horizon="log", policy="belady-window")
    if draw(st.booleans()):
        return spec, with_next_uses(spec, batches)
    wrong = st.integers(-1, 20) | st.sampled_from([NO_USE, NO_USE - 1, 5_000, 300_000])
    return spec, [
        dataclasses.replace(batch, next_use=np.array([draw(wrong) for _ in batch.values], dtype=np.int32))
        for batch in batches
    ]


def with_next_uses(spec: OracleSpec, batches: Sequence[Batch]) -> list[Batch]:
    """The batches, each telling the true next uses of its rows."""
    tables = {ref.feature: ref.table for ref in spec.features}
    upcoming: dict[tuple[int, int], int] = {}
    found = []
    for batch in reversed(batches):
        features = np.repeat(np.arange(batch.num_features), np.diff(batch.feature_offsets()))
        rows = [(tables[feature], i) for feature, i in zip(features.tolist(), batch.values.tolist(), strict=True)]
        next_use = np.array([upcoming.get(row, NO_USE) for row in rows], dtype=np.int32)
        found.append(dataclasses.replace(batch, next_use=next_use))
        upcoming.update(dict.fromkeys(rows, batch.index))
    return found[::-1]


@st.composite
def mortal_traces(draw: st.DrawFn) -> tuple[OracleSpec, list[Batch]]:
    """As `traces`, with rows that expire after a few steps or examples, in some tables."""
    spec, batches = draw(traces(max_batches=24))
    tables = {ref.feature: ref.table for ref in spec.features if ref.table != 3}
    schema = DataSchema(
        label="label",
        dense=(),
        features=tuple(Feature(name=str(n), table=str(tables[n])) for n in sorted(tables)),
        tables=tuple(Table(name=str(table), rows=spec.table_rows[0]) for table in sorted(set(tables.values()))),
    )
    limits = draw(st.dictionaries(st.sampled_from([table.name for table in schema.tables]), st.integers(1, 12)))
    unit: ExpiryUnit = draw(st.sampled_from(["steps", "examples"]))
    rules = ExpiryRules(limits=limits, unit=unit, every=draw(st.sampled_from([1, 2, 5])))
    return dataclasses.replace(spec, rows_delay=0), with_lives(schema, rules, batches)


def with_lives(schema: DataSchema, rules: ExpiryRules, batches: Sequence[Batch]) -> list[Batch]:
    """The batches, each telling the rows that expire before it and those that are born."""
    expiry = RowExpiry(schema, rules)
    return [expiry.follow(batch, expiry.begin(batch)) for batch in batches]


def with_rank_examples(draw: st.DrawFn, batch: Batch, world_size: int) -> Batch:
    """The batch as one to which the ranks brought any numbers of examples."""
    cuts = st.lists(st.integers(0, batch.num_examples), min_size=world_size - 1, max_size=world_size - 1)
    borders = [0, *sorted(draw(cuts)), batch.num_examples]
    sizes = tuple(stop - start for start, stop in itertools.pairwise(borders))
    return dataclasses.replace(batch, rank_examples=sizes)
