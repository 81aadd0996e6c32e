"""Plans of one batch for several ranks, with random assignment, owners and sync marks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import NO_BATCH, ConsumerPlan, ExchangePlan, FeatureRef
from bagpipe.types.batch import Batch
from tests.cache.plans import consumer_plan, row_list

__all__ = ["Home", "RankPlan", "exchange_plan", "rank_plans", "rows_of"]

Row = tuple[int, int]  # (table, id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The part of one rank: its examples, its reads and its exchange."""

    batch: Batch
    consumer: ConsumerPlan
    exchange: ExchangePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Owner and slot of a row, and whether the previous (pull) or next (sync) batch uses it."""

    owner: int
    slot: int
    pull_now: bool
    push_now: bool


def examples_of(batch: Batch, chosen: Sequence[int]) -> Batch:
    """The sub-batch of the given examples."""
    starts = np.concatenate([[0], np.cumsum(batch.lengths.reshape(-1))])
    bags = [feature * batch.num_examples + example for feature in range(batch.num_features) for example in chosen]
    positions = np.array([p for bag in bags for p in range(starts[bag], starts[bag + 1])], dtype=np.int64)
    return dataclasses.replace(
        batch,
        dense=batch.dense[list(chosen)],
        labels=batch.labels[list(chosen)],
        lengths=np.ascontiguousarray(batch.lengths[:, list(chosen)]),
        values=batch.values[positions],
        weights=None if batch.weights is None else batch.weights[positions],
    )


def rows_of(plan: ConsumerPlan) -> list[Row]:
    offsets = plan.unique.table_offsets
    return [(t, int(i)) for t in range(len(offsets) - 1) for i in plan.unique.ids[offsets[t] : offsets[t + 1]]]


def rank_plans(
    rng: np.random.Generator, batch: Batch, features: Sequence[FeatureRef], *, num_tables: int, world_size: int
) -> list[RankPlan]:
    """The plans of all ranks."""
    rank_of_example = rng.integers(0, world_size, size=batch.num_examples)
    batches = [examples_of(batch, np.flatnonzero(rank_of_example == rank).tolist()) for rank in range(world_size)]
    plans = [consumer_plan(part, features, num_tables, lambda n: np.zeros(n, np.int32)) for part in batches]
    rows = sorted({row for plan in plans for row in rows_of(plan)})
    slots = rng.permutation(len(rows))
    homes = {
        row: Home(
            owner=int(rng.integers(world_size)),
            slot=int(slot),
            pull_now=bool(rng.integers(2)),
            push_now=bool(rng.integers(2)),
        )
        for row, slot in zip(rows, slots, strict=True)
    }
    consumers = [
        dataclasses.replace(
            plan,
            slots=np.array([homes[row].slot for row in rows_of(plan)], np.int32),
            owners=np.array([homes[row].owner for row in rows_of(plan)], np.uint16),
            push_now=np.array([homes[row].push_now for row in rows_of(plan)], np.bool_),
        )
        for plan in plans
    ]
    exchanges = [exchange_plan(rank, consumers, homes, num_tables) for rank in range(world_size)]
    return [
        RankPlan(batch=part, consumer=consumer, exchange=exchange)
        for part, consumer, exchange in zip(batches, consumers, exchanges, strict=True)
    ]


def exchange_plan(
    rank: int, consumers: Sequence[ConsumerPlan], homes: dict[Row, Home], num_tables: int
) -> ExchangePlan:
    """The exchange of one rank, from the reads of all ranks and the homes of the rows."""
    owned = sorted(row for row, home in homes.items() if home.owner == rank)
    place = {row: position for position, row in enumerate(owned)}
    served = [[place[row] for row in rows_of(consumer) if row in place] for consumer in consumers]

    def marks(rows: Sequence[Row], name: str) -> NDArray[np.bool_]:
        return np.array([getattr(homes[row], name) for row in rows], np.bool_)

    return ExchangePlan(
        pull_now=marks(rows_of(consumers[rank]), "pull_now"),
        owned=row_list([np.array([i for t, i in owned if t == table], np.int64) for table in range(num_tables)]),
        owned_slots=np.array([homes[row].slot for row in owned], np.int32),
        owned_pull_now=marks(owned, "pull_now"),
        owned_push_now=marks(owned, "push_now"),
        serve_offsets=np.cumsum([0, *map(len, served)]).astype(np.int32),
        serve_rows=np.array([position for rows in served for position in rows], np.int32),
        ready_after=NO_BATCH,
    )
