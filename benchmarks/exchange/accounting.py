"""Rows that cross ranks, counted from plans and batches. Nothing is trained.

plan  ──> ExchangeCounts: pulls and pushes between owners and consumers, listed by the plan (`data.replay.plan_counts`)
batch ──> GlobalCounts: input of the other ways to exchange rows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.handles import HashHandles
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.window import NextUses
from bagpipe.types.batch import Batch
from data.replay.plan_counts import ExchangeCounts

__all__ = ["GlobalCounts", "count_global", "count_owned", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Counts of one global batch, whichever rank trains it; the other two ways are computed from them.

    Attributes:
        occurrences: ids.
        bags: examples times features.
        unique: distinct rows.
        needed_next: rows used by the next batch.
        leaving: rows without a further use in the window.
        single: leaving rows that occur once.
    """

    occurrences: float
    bags: float
    unique: float
    needed_next: float
    leaving: float
    single: float


Counts = TypeVar("Counts", ExchangeCounts, GlobalCounts)


def count_owned(batches: Iterator[Batch], spec: OracleSpec) -> Iterator[ExchangeCounts]:
    """Counts of every batch."""
    return (ExchangeCounts.of(plan) for _, plan in plan_batches(batches, spec))


def count_global(batches: Iterator[Batch], spec: OracleSpec) -> Iterator[GlobalCounts]:
    """Counts of every batch, once the window of `spec.lookahead` batches is full."""
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
