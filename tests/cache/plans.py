"""Simple plans for tests: `numpy.unique` per table; a batch evicts all rows that it does not use.

Slots are random, so tests do not depend on slot numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.batch_context import BatchContext, prepare_batch
from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.oracle.plan import NO_BATCH, ConsumerPlan, FeatureRef, OwnerPlan, RowList
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.store.row_checksum import table_check_words
from bagpipe.store.validation import row_dtype
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema


def row_list(ids_by_table: Sequence[NDArray[np.int64]]) -> RowList:
    offsets = np.zeros(len(ids_by_table) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in ids_by_table], out=offsets[1:])
    return RowList(table_offsets=offsets, ids=np.concatenate([*ids_by_table, np.zeros(0, dtype=np.int64)]))


def random_batch(
    rng: np.random.Generator,
    *,
    index: int = 0,
    num_examples: int,
    num_ids: Sequence[int],
    max_length: int,
    weighted: bool = False,
    min_length: int = 0,
) -> Batch:
    """Random bags of `min_length` to `max_length` ids; feature f draws from ``[0, num_ids[f])``."""
    lengths = rng.integers(min_length, max_length + 1, size=(len(num_ids), num_examples), dtype=np.int32)
    values = [rng.integers(0, limit, size=row.sum()) for limit, row in zip(num_ids, lengths, strict=True)]
    num_values = int(lengths.sum())
    return Batch(
        index=index,
        dense=rng.standard_normal((num_examples, 2)).astype(np.float32),
        values=np.concatenate(values).astype(np.int64),
        lengths=lengths,
        weights=rng.standard_normal(num_values).astype(np.float32) if weighted else None,
        labels=rng.integers(0, 2, size=num_examples).astype(np.float32),
    )


def consumer_plan(
    batch: Batch, features: Sequence[FeatureRef], num_tables: int, slots: Callable[[int], NDArray[np.int32]]
) -> ConsumerPlan:
    """The plan of a batch; `slots(n)` gives the slots of its n unique rows."""
    starts = batch.feature_offsets()
    unique_ids, inverses = [], []
    num_unique = 0
    for table in range(num_tables):
        parts = [batch.values[starts[ref.feature] : starts[ref.feature + 1]] for ref in features if ref.table == table]
        occurrences = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
        ids, inverse = np.unique(occurrences, return_inverse=True)
        unique_ids.append(ids)
        inverses.append(inverse + num_unique)
        num_unique += len(ids)
    inverse = np.concatenate(inverses)
    offsets = np.zeros(num_unique + 1, dtype=np.int32)
    np.cumsum(np.bincount(inverse, minlength=num_unique), out=offsets[1:])
    return ConsumerPlan(
        unique=row_list(unique_ids),
        offsets=offsets,
        order=np.argsort(inverse, kind="stable").astype(np.int32),
        slots=slots(num_unique),
        owners=np.zeros(num_unique, dtype=np.uint16),
        push_now=np.ones(num_unique, dtype=np.bool_),
    )


def owner_plan(
    fetch: RowList,
    fetch_slots: NDArray[np.int32],
    evict: RowList,
    evict_slots: NDArray[np.int32],
    *,
    new: NDArray[np.bool_] | None = None,
    num_slots: int | None = None,
) -> OwnerPlan:
    used = [int(slots.max()) + 1 for slots in (fetch_slots, evict_slots) if len(slots)]
    return OwnerPlan(
        fetch=fetch,
        fetch_slots=fetch_slots,
        fetch_new=np.zeros(len(fetch), dtype=np.bool_) if new is None else new,
        evict=evict,
        evict_slots=evict_slots,
        evict_after=NO_BATCH,
        evict_waiting=0,
        fetch_after=NO_BATCH,
        num_slots=max(used, default=0) if num_slots is None else num_slots,
    )


class DictStore:
    """Rows by (table, id), as kept between two batches. Checks that a write names the rows it replaces."""

    def __init__(self, schema: RowSchema) -> None:
        self.schema = schema
        self.rows: dict[tuple[int, int], NDArray[Any]] = {}

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        results = []
        for table, ids in requests:
            rows = np.zeros((len(ids), self.schema.row_width(table)), dtype=row_dtype(self.schema, table))
            found = np.array([(table, int(row_id)) in self.rows for row_id in ids], dtype=np.bool_)
            for place in np.flatnonzero(found):
                rows[place] = self.rows[table, int(ids[place])]
            words = np.where(found, table_check_words(table, ids, rows), np.uint64(0))
            rows.flags.writeable = False  # a store may hand out views of what it received
            results.append(ReadResult(rows, found, words))
        return results

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        for request in requests:
            replaced = self.read_many([(request.table, request.ids)])[0].checks
            assert request.replaced is not None
            assert request.replaced.tolist() == replaced.tolist()
            for row_id, row in zip(request.ids.tolist(), request.rows, strict=True):
                self.rows[request.table, row_id] = row.copy()


@dataclass
class Job:
    """A cache and a store that process batches in sequence."""

    cache: RowCache
    store: DictStore
    layout: LookupLayout
    seed: int = 0
    num_spare_slots: int = 7

    def steps(self, batches: Sequence[Batch]) -> Iterator[BatchContext]:
        """Per batch: evict the unused rows of the previous one, fetch missing rows, begin the batch."""
        rng = np.random.default_rng(self.seed)
        schema = self.cache.schema
        num_tables = len(schema.tables)
        resident: dict[tuple[int, int], int] = {}
        uploads = self.cache.uploads(2)
        for batch in batches:
            plan = consumer_plan(batch, self.layout.features, num_tables, lambda n: np.zeros(n, dtype=np.int32))
            tables = np.repeat(np.arange(num_tables), np.diff(plan.unique.table_offsets)).tolist()
            keys = list(zip(tables, plan.unique.ids.tolist(), strict=True))
            leaving = sorted(set(resident) - set(keys))
            leaving_slots = np.array([resident.pop(key) for key in leaving], dtype=np.int32)
            entering = [key for key in keys if key not in resident]
            num_slots = len(keys) + self.num_spare_slots
            free = np.setdiff1d(np.arange(max(num_slots, len(self.cache.slots))), list(resident.values()))
            entering_slots = rng.permutation(free)[: len(entering)].astype(np.int32)
            resident.update(zip(entering, entering_slots.tolist(), strict=True))
            owner = owner_plan(_rows(entering, num_tables), entering_slots, _rows(leaving, num_tables), leaving_slots)
            self.store.write_many(self.cache.evict(owner))
            requests = FetchRequests.of(owner, skip_new=False)
            self.cache.insert(owner, requests, self.store.read_many(requests.reads))
            slots = np.array([resident[key] for key in keys], dtype=np.int32)
            plan = dataclasses.replace(plan, slots=slots)
            with uploads.batch() as upload:
                context = prepare_batch(self.layout, batch, plan, upload=upload)
            self.cache.check(context)
            self.cache.begin(context)
            yield context

    def finish(self) -> dict[tuple[int, int], NDArray[Any]]:
        """Flush. Returns all rows of the store."""
        for requests in self.cache.flush(chunk_rows=5):
            self.store.write_many(requests)
        return self.store.rows


def _rows(keys: Sequence[tuple[int, int]], num_tables: int) -> RowList:
    return row_list(
        [
            np.array([row_id for table, row_id in keys if table == number], dtype=np.int64)
            for number in range(num_tables)
        ]
    )
