"""Rows that cross ranks, counted from plans and batches. Nothing is trained.

plan  ──> OwnedCounts: pulls and pushes between owners and consumers, as the plan lists them
batch ──> GlobalCounts: what the other ways to exchange rows are computed from
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.batch import Batch
from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.handles import HashHandles
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import CachePlan, OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.window import NextUses

__all__ = ["GlobalCounts", "OwnedCounts", "count_global", "count_owned", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedCounts:
    """Rows of one batch, over all ranks; with an owner per row.

    Attributes:
        pull_now, pull_early: rows sent by owners to other ranks: after the update of the batch before, or during it.
        push_now, push_late: row gradients sent to owners on other ranks: before the next batch, or during it.
        busiest_now, busiest: rows sent by the rank that sends most: those a step waits for, and all.
        used: unique rows of each rank, summed; what would travel if no rank owned anything it uses.
        fetched, written: rows read from the store and written back. busiest_fetched: by the rank that reads most.
    """

    pull_now: float
    pull_early: float
    push_now: float
    push_late: float
    busiest_now: float
    busiest: float
    used: float
    fetched: float
    written: float
    busiest_fetched: float

    @classmethod
    def of(cls, plan: CachePlan) -> Self:
        """Count one plan."""
        num_ranks = len(plan.consumers)
        pulls, pushes = np.zeros((2, num_ranks)), np.zeros((2, num_ranks))  # [now], [early or late]; by sender
        for rank, exchange in enumerate(plan.exchanges):
            own = slice(*exchange.serve_offsets[rank : rank + 2])
            sent = np.delete(exchange.serve_rows, np.r_[own])
            now = int(exchange.owned_pull_now[sent].sum())
            pulls[:, rank] = now, len(sent) - now
        for rank, consumer in enumerate(plan.consumers):
            is_remote = consumer.owners != rank
            now = int(consumer.sync_now[is_remote].sum())
            pushes[:, rank] = now, int(is_remote.sum()) - now
        fetched = [len(owner.fetch) for owner in plan.owners]
        return cls(
            pull_now=pulls[0].sum(),
            pull_early=pulls[1].sum(),
            push_now=pushes[0].sum(),
            push_late=pushes[1].sum(),
            busiest_now=(pulls[0] + pushes[0]).max(),
            busiest=(pulls + pushes).sum(axis=0).max(),
            used=sum(len(consumer.unique) for consumer in plan.consumers),
            fetched=sum(fetched),
            written=sum(len(owner.evict) for owner in plan.owners),
            busiest_fetched=max(fetched),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """What a batch holds, whoever trains it; the other two ways are counted from these.

    Attributes:
        occurrences: ids.
        bags: examples times features.
        unique: distinct rows.
        needed_next: rows that the next batch uses.
        leaving: rows without a further use in the window.
        single: leaving rows that occur once.
    """

    occurrences: float
    bags: float
    unique: float
    needed_next: float
    leaving: float
    single: float


Counts = TypeVar("Counts", OwnedCounts, GlobalCounts)


def count_owned(batches: Iterator[Batch], spec: OracleSpec) -> Iterator[OwnedCounts]:
    """Batch by batch."""
    return (OwnedCounts.of(plan) for _, plan in plan_batches(batches, spec))


def count_global(batches: Iterator[Batch], spec: OracleSpec) -> Iterator[GlobalCounts]:
    """Batch by batch, once the window of `spec.lookahead` batches is full."""
    indexer, handles_of = Indexer(spec), HashHandles()
    num_handles = handles_of.num_handles
    next_uses = NextUses(num_handles)
    window: deque[tuple[Batch, NDArray[np.int64], NDArray[np.bool_]]] = deque()
    for batch in batches:
        index = indexer.index(batch)
        handles = handles_of.lookup_or_add(index.unique)
        if handles_of.num_handles > num_handles:
            num_handles = handles_of.num_handles
            next_uses.grow(num_handles)
        next_uses.enter(handles, batch.index)
        window.append((batch, handles, np.diff(index.offsets) == 1))
        if len(window) < spec.lookahead:
            continue
        oldest, handles, is_single = window.popleft()
        next_use = next_uses.leave(handles)
        is_leaving = next_use == NEVER
        handles_of.release(handles[is_leaving])
        yield GlobalCounts(
            occurrences=len(oldest.values),
            bags=oldest.lengths.size,
            unique=len(handles),
            needed_next=int((next_use == oldest.index + 1).sum()),
            leaving=int(is_leaving.sum()),
            single=int((is_leaving & is_single).sum()),
        )


def mean(counts: list[Counts]) -> Counts:
    """The mean of each count."""
    kind = type(counts[0])
    return kind(**{field.name: float(np.mean([getattr(c, field.name) for c in counts])) for field in fields(kind)})
