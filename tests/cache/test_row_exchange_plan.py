from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.row_exchange_plan import GroupExchange
from bagpipe.cache.upload import Uploader
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.schema import RowTable
from tests.cache.plans import consumer_plan, random_batch
from tests.cache.rank_plans import Home, exchange_plan, rank_plans, rows_of
from tests.effort import at_most

TABLES = (RowTable(name="a", dim=4), RowTable(name="b", dim=8), RowTable(name="c", dim=8, optimizer="frozen"))
FEATURES = tuple(FeatureRef(feature=f, table=t) for f, t in [(0, 0), (1, 1), (2, 2)])
NUM_IDS = (7, 5, 4)
LAYOUT = build_layout(TABLES, FEATURES, [TableLookup()] * 3)


@at_most(30)
@given(seed=st.integers(0, 2**32), num_examples=st.integers(0, 10), world_size=st.integers(1, 5))
def test_both_ends_list_the_same_rows(seed: int, num_examples: int, world_size: int) -> None:
    """Counts sent by rank a to b equal counts received by b from a, in every part of every group; no row is missing."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_examples=num_examples, num_ids=NUM_IDS, max_length=3)
    plans = rank_plans(rng, batch, FEATURES, num_tables=len(TABLES), world_size=world_size)
    contexts = [
        prepare_batch(LAYOUT, p.batch, p.consumer, p.exchange, upload=Uploader(torch.device("cpu"), torch.float32))
        for p in plans
    ]
    for number in range(len(LAYOUT.groups)):
        groups = [context.groups[number] for context in contexts]
        exchanges = [group.exchange for group in groups if group.exchange is not None]
        assert len(exchanges) == world_size
        for name in ("prepull", "pull", "push", "push_late"):
            given_rows = np.array([getattr(exchange, name).send_counts for exchange in exchanges])
            taken_rows = np.array([getattr(exchange, name).recv_counts for exchange in exchanges])
            assert (given_rows == taken_rows.T).all(), name
        for group, exchange in zip(groups, exchanges, strict=True):
            assert exchange.prepull.first == 0
            assert exchange.prepull.end == exchange.pull.first
            assert exchange.pull.end == group.num_rows
            num_pushed = sum(exchange.push.send_counts) + sum(exchange.push_late.send_counts)
            assert num_pushed == (0 if group.tables.is_frozen else group.num_rows)
            if group.tables.is_frozen:
                assert sum(exchange.pull.recv_counts) == len(exchange.push.owned.rows) == 0
                assert len(exchange.push_late.owned.rows) == 0
            for part, segment_sum in zip((exchange.push, exchange.push_late), group.backward, strict=True):
                assert len(segment_sum) == sum(part.send_counts)
                assert len(part.segment_sum) == len(part.owned.rows)
                assert sorted(part.segment_sum.sources.tolist()) == list(range(sum(part.recv_counts)))
                # contributions to a row in rank order: earlier arrivals come from lower ranks
                starts = part.segment_sum.row_starts
                for row in range(len(part.segment_sum)):
                    assert (np.diff(part.segment_sum.sources[starts[row] : starts[row + 1]]) > 0).all()


def test_golden() -> None:
    """Two ranks, one table: rank 0 owns 5 and 9, rank 1 owns 7; the previous batch used 9."""
    layout = build_layout(TABLES[:1], FEATURES[:1], [TableLookup()])
    rng = np.random.default_rng(0)
    base = random_batch(rng, num_examples=2, num_ids=(1,), max_length=2, min_length=2)
    batches = [dataclasses.replace(base, values=np.array(ids)) for ids in ([5, 7, 9, 5], [9, 9, 7, 5])]
    homes = {
        (0, 5): Home(owner=0, slot=3, pull_now=False, push_now=True),
        (0, 7): Home(owner=1, slot=8, pull_now=False, push_now=False),
        (0, 9): Home(owner=0, slot=1, pull_now=True, push_now=True),
    }
    consumers = []
    for batch in batches:
        plan = consumer_plan(batch, FEATURES[:1], 1, lambda n: np.zeros(n, np.int32))
        owners = np.array([homes[row].owner for row in rows_of(plan)], np.uint16)
        push_now = np.array([homes[row].push_now for row in rows_of(plan)], np.bool_)
        consumers.append(dataclasses.replace(plan, owners=owners, push_now=push_now))
    exchange = exchange_plan(0, consumers, homes, 1)
    context = prepare_batch(
        layout, batches[0], consumers[0], exchange, upload=Uploader(torch.device("cpu"), torch.float32)
    )
    group = context.groups[0]
    parts = group.exchange
    assert isinstance(parts, GroupExchange)
    assert parts.prepull.slot_index.tolist() == [3, 3]  # row 5 for itself and for rank 1
    assert (parts.prepull.send_counts, parts.prepull.recv_counts) == (
        (1, 1),
        (1, 1),
    )  # it takes 5 from itself, 7 from rank 1
    assert parts.pull.slot_index.tolist() == [1, 1]
    assert (parts.pull.send_counts, parts.pull.recv_counts) == ((1, 1), (1, 0))
    assert group.inverse.tolist() == [0, 1, 2, 0]  # rows stand as 5, 7, then 9
    assert (parts.push.send_counts, parts.push.recv_counts) == ((2, 0), (2, 2))
    assert parts.push.owned.slots.tolist() == [3, 1]
    assert parts.push.segment_sum.sources.tolist() == [0, 2, 1, 3]  # 5: from rank 0, from rank 1; then 9
    assert (parts.push_late.send_counts, parts.push_late.recv_counts) == ((0, 1), (0, 0))
    assert [segment_sum.row_starts.tolist() for segment_sum in group.backward] == [[0, 2, 3], [0, 1]]
    assert [segment_sum.sources.tolist() for segment_sum in group.backward] == [[0, 1, 1], [0]]  # bags of 5, of 9; of 7
