"""Exchange of rows and gradients: random examples, owners, and split into rows pushed now and late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, prepare_batch
from bagpipe.cache.lookup import ActiveTableGroup, gradients_of, lookup
from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_exchange import Givers, RowExchange
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.cache.upload import Uploader
from bagpipe.errors import JobError, PeerError
from bagpipe.kernels.interface import RowStep
from bagpipe.oracle.plan import FeatureRef
from bagpipe.testing.local_peers import LocalPeers, local_peers
from bagpipe.types.schema import RowSchema, RowTable
from tests.cache.plans import DictStore, Job, owner_plan, random_batch, row_list
from tests.cache.rank_plans import RankPlan, rank_plans
from tests.effort import at_most

TABLES = (RowTable(name="a", dim=4), RowTable(name="b", dim=4), RowTable(name="c", dim=6))
LOOKUPS = (TableLookup(pooling="mean"), TableLookup(pooling="mean"), TableLookup(pooling="none"))
FEATURES = tuple(FeatureRef(feature=f, table=t) for f, t in [(0, 0), (1, 0), (0, 1), (2, 2)])
NUM_IDS = (9, 9, 5)
LAYOUT = build_layout(TABLES, FEATURES, LOOKUPS)
SCHEMA = RowSchema(tables=TABLES, optimizer="adagrad", dtype="float64", seed=3)
STEP = RowStep(lr=0.1, eps=1e-6, step=1)
CPU = torch.device("cpu")


def loss_of(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack([(part * (1 + part)).sum() for part in vectors]).sum()


def records(cache: RowCache) -> dict[tuple[int, int], NDArray[Any]]:
    """The updated rows, as a flush writes them."""
    store = DictStore(SCHEMA)
    for requests in cache.flush():
        store.write_many(requests)
    return store.rows


def on_all_ranks(peers: Sequence[LocalPeers], work: Callable[[int], None]) -> list[BaseException | None]:
    """Run `work(rank)` in one thread per rank; returns their errors."""
    errors: list[BaseException | None] = [None] * len(peers)

    def body(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors[rank] = error
            peers[rank].close()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def cache_of(plan: RankPlan, num_slots: int) -> RowCache:
    """A cache with the rank's owned rows in their slots, freshly initialised."""
    cache = RowCache(SCHEMA, num_slots)
    nothing = row_list([np.zeros(0, np.int64)] * len(TABLES))
    owner = owner_plan(
        plan.exchange.owned,
        plan.exchange.owned_slots,
        nothing,
        np.zeros(0, np.int32),
        new=np.ones(len(plan.exchange.owned), np.bool_),
    )
    cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])
    return cache


def context_of(plan: RankPlan) -> BatchContext:
    return prepare_batch(LAYOUT, plan.batch, plan.consumer, plan.exchange, upload=Uploader(CPU, torch.float64))


def begun(
    cache: RowCache, peers: LocalPeers, plan: RankPlan
) -> tuple[RowExchange, BatchContext, tuple[ActiveTableGroup, ...]]:
    """The exchange of a rank whose batch has its rows, and the groups of the batch."""
    exchange, context = RowExchange(cache, peers), context_of(plan)
    exchange.prepull(context)
    exchange.pull(context)
    exchange.begin(context)
    assert cache.current is not None
    return exchange, context, tuple(cache.current.groups)


def exchanged(plans: Sequence[RankPlan], givers: Givers) -> tuple[dict[tuple[int, int], NDArray[Any]], int]:
    """The rows after a batch whose backward reaches no row of the second rank's, and how many rows were sent."""
    peers = local_peers(len(plans))
    caches = [cache_of(plan, num_slots=sum(NUM_IDS) + 9) for plan in plans]

    def work(rank: int) -> None:
        exchange, context, groups = begun(caches[rank], peers[rank], plans[rank])
        if givers is None or givers[rank]:
            (loss_of([lookup(group) for group in groups]) * (rank != 1)).backward()
        exchange.push_late(exchange.push(context, givers), givers)
        exchange.update(context, STEP)
        exchange.update_late(context, STEP)

    assert on_all_ranks(peers, work) == [None] * len(plans)
    merged: dict[tuple[int, int], NDArray[Any]] = {}
    for cache in caches:
        merged |= records(cache)
    return merged, sum(sum(peer.rows_sent.values()) for peer in peers)


def test_a_rank_without_gradients_sends_none() -> None:
    """The rows are as if it had sent zeros."""
    rng = np.random.default_rng(7)
    batch = random_batch(rng, num_examples=9, num_ids=NUM_IDS, max_length=3)
    plans = rank_plans(rng, batch, FEATURES, num_tables=len(TABLES), world_size=3)
    (rows, sent), (with_zeros, all_sent) = exchanged(plans, [True, False, True]), exchanged(plans, None)
    assert rows.keys() == with_zeros.keys()
    for row, values in with_zeros.items():
        np.testing.assert_array_equal(rows[row], values)
    assert sent < all_sent


@at_most(25)
@given(seed=st.integers(0, 2**32), num_examples=st.integers(0, 12), world_size=st.integers(1, 4))
def test_one_batch_of_many_ranks_equals_that_of_one(seed: int, num_examples: int, world_size: int) -> None:
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_examples=num_examples, num_ids=NUM_IDS, max_length=3)
    alone = Job(RowCache(SCHEMA, 0), DictStore(SCHEMA), LAYOUT)
    (context,) = alone.steps([batch])
    assert alone.cache.current is not None
    loss = loss_of([lookup(group) for group in alone.cache.current.groups])
    loss.backward()
    gradients = [gradients_of(group, 0) for group in alone.cache.current.groups]
    expected_squares = sum(float(alone.cache.kernels.sum(each).square().sum()) for each in gradients)
    alone.cache.update(context, STEP)

    plans = rank_plans(rng, batch, FEATURES, num_tables=len(TABLES), world_size=world_size)
    peers = local_peers(world_size)
    caches = [cache_of(plan, num_slots=sum(NUM_IDS) + 9) for plan in plans]
    losses = [0.0] * world_size
    squares = [0.0] * world_size

    def work(rank: int) -> None:
        exchange, context, groups = begun(caches[rank], peers[rank], plans[rank])
        loss = loss_of([lookup(group) for group in groups])
        loss.backward()
        losses[rank] = loss.item()
        exchange.push_late(exchange.push(context))
        squares[rank] = exchange.squares(context).item()
        exchange.update(context, STEP)
        exchange.update_late(context, STEP)

    assert on_all_ranks(peers, work) == [None] * world_size
    assert set(squares) == {squares[0]}
    assert squares[0] == pytest.approx(expected_squares, rel=1e-12)
    assert sum(losses) == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    expected = records(alone.cache)
    got = {row: record for cache in caches for row, record in records(cache).items()}
    assert got.keys() == expected.keys()
    for row, record in expected.items():
        np.testing.assert_allclose(got[row], record, rtol=1e-12, atol=1e-12)


def test_a_group_that_the_loss_ignores_is_an_error_on_its_rank() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng, num_examples=6, num_ids=NUM_IDS, max_length=2, min_length=1)
    plans = rank_plans(rng, batch, FEATURES, num_tables=len(TABLES), world_size=2)
    peers = local_peers(2, timeout_s=20)
    caches = [cache_of(plan, num_slots=40) for plan in plans]

    def work(rank: int) -> None:
        exchange, context, groups = begun(caches[rank], peers[rank], plans[rank])
        used = groups if rank == 0 else groups[:1]
        loss_of([lookup(group) for group in used]).backward()
        exchange.push(context)

    first, second = on_all_ranks(peers, work)
    assert isinstance(first, PeerError)
    assert isinstance(second, JobError)
    assert "the loss does not depend on the rows of tables number 2 to 2" in str(second)


def test_plans_of_one_rank_are_refused() -> None:
    rng = np.random.default_rng(0)
    batch = random_batch(rng, num_examples=3, num_ids=NUM_IDS, max_length=2)
    (plan,) = rank_plans(rng, batch, FEATURES, num_tables=len(TABLES), world_size=1)
    context = prepare_batch(LAYOUT, plan.batch, plan.consumer, upload=Uploader(CPU, torch.float64))
    with pytest.raises(JobError, match="was planned for one rank, there are several"):
        RowExchange(cache_of(plan, 40), local_peers(1)[0]).prepull(context)
    with pytest.raises(JobError, match="was planned for several ranks, but has no exchanged rows"):
        cache_of(plan, 40).begin(context_of(plan))
