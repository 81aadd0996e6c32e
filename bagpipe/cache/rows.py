"""`RowCache`: the slab of row records on the device, and what the engine's lanes do to it.

    lane copy:    evict(owner) ─> WriteRequest…      insert(owner, results)
    lane compute: begin(context) ─> model forward, backward ─> update(context, …)   with several ranks: `RowExchange`
    at the end:   flush() ─> WriteRequest…           clear()

Rule of this file: a lane touches only the slots its plan names. `insert` for batch b + 1 may run in another thread
while batch b computes; `evict` wants the update of `OwnerPlan.evict_after` to be done; growing wants all lanes idle.
Rows are dirty from their update until they are handed out to be written; a clean row is never written.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.capture import CapturedRows, RowCapture
from bagpipe.cache.lookup import ActiveRun, ActiveStep, gradient_terms
from bagpipe.cache.slab import Scratch, Slab
from bagpipe.cache.slots import Slots, SlotTable, row_tables
from bagpipe.cache.step import RunContext, StepContext
from bagpipe.cache.upload import SlotRows
from bagpipe.errors import JobError
from bagpipe.kernels.initial import TORCH_DTYPE
from bagpipe.kernels.interface import Kernels, RowStep, RowView, Terms
from bagpipe.kernels.open import open_kernels
from bagpipe.kernels.torch_kernels import gather, scatter
from bagpipe.oracle.plan import OwnerPlan, RowList
from bagpipe.schema import RowSchema
from bagpipe.store.interface import ReadResult, WriteRequest

__all__ = ["CacheStatistics", "RowCache"]

#: Rows of one flush chunk: 16 MiB of 256-byte records, so the host copy stays small beside the cache.
FLUSH_CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """What is in the cache now, and totals since it was made.

    Attributes:
        num_slots: slots.
        resident, dirty: slots that hold a row; that hold a row newer than the store's.
        inserted: rows put into slots; `initialised` of them had no stored value.
        evicted: rows that left their slots; `evicted_dirty` of them had to be written.
        updated: row updates.
    """

    num_slots: int
    resident: int
    dirty: int
    inserted: int
    initialised: int
    evicted: int
    evicted_dirty: int
    updated: int


class RowCache:
    """The rows one rank holds.

    Args:
        schema: tables, optimizer, dtype and seed.
        num_slots: rows it can hold; 0 (direct mode): as many as the plans ask for.
        device: where the rows live.

    Attributes:
        slots: which slot holds which row.
        kernels: what computes on the rows.
        current: the batch being computed, read by the embedding modules.
        capture: copies rows for checkpoints.
    """

    def __init__(self, schema: RowSchema, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.schema = schema
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPE[schema.dtype]
        self.slots = SlotTable(num_slots)
        self.current: ActiveStep | None = None
        self._fixed = num_slots > 0
        self.kernels: Kernels = open_kernels(schema, self.device)
        self._widths = [schema.row_width(table) for table in range(len(schema.tables))]
        self._slab = Slab(num_slots, max(self._widths, default=1), self.dtype, self.device)
        self._gathered = [Scratch(self.dtype, self.device) for _ in schema.tables]  # per run; there are no more runs
        self._staging = Scratch(self.dtype, torch.device("cpu"))
        self._inserted = self._initialised = self._evicted = self._evicted_dirty = self._updated = 0
        self._count_lock = threading.Lock()
        self.capture = RowCapture(
            self.slots,
            len(schema.tables),
            max(self._widths, default=1) * self.dtype.itemsize,
            self._copy_out,
            self.device,
        )

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            num_slots=len(self.slots),
            resident=self.slots.num_resident,
            dirty=self.slots.num_dirty,
            inserted=self._inserted,
            initialised=self._initialised,
            evicted=self._evicted,
            evicted_dirty=self._evicted_dirty,
            updated=self._updated,
        )

    @property
    def is_fixed(self) -> bool:
        """It has a fixed number of slots: not direct mode."""
        return self._fixed

    def ensure_slots(self, num_slots: int) -> None:
        """Have room for `num_slots` rows. In direct mode the slab grows, which wants all lanes idle.

        Raises:
            JobError: the cache has a fixed number of slots, and it is smaller.
        """
        if num_slots <= len(self.slots):
            return
        if self._fixed:
            raise JobError(f"the plan uses {num_slots} slots, the cache has {len(self.slots)}")
        # A quarter more than asked for: batches differ a little in size, and each growth copies the slab.
        num_slots += num_slots // 4
        self._slab.grow(num_slots)
        self.slots.grow(num_slots)

    # ---- store -> slots ------------------------------------------------------------------------------------------

    def fetch_requests(self, owner: OwnerPlan, *, skip_new: bool) -> list[tuple[int, NDArray[np.int64]]]:
        """What to read from the store for a plan, as `Store.read_many` takes it: (table number, ids) per table.

        Args:
            owner: the plan.
            skip_new: leave out rows the oracle has never planned before, which an initially empty store cannot have.
        """
        fetch = owner.fetch
        wanted = ~owner.fetch_new if skip_new else np.ones(len(fetch), dtype=np.bool_)
        requests = []
        for table, (first, end) in enumerate(pairwise(fetch.table_offsets.tolist())):
            ids = fetch.ids[first:end][wanted[first:end]]
            if len(ids):
                requests.append((table, ids))
        return requests

    def insert(self, owner: OwnerPlan, results: Sequence[ReadResult], *, skip_new: bool) -> None:
        """Put the fetched rows into their slots; a row that was not read, or not found, gets its initial value.

        Args:
            owner: the plan.
            results: answers to `fetch_requests` of the same plan and `skip_new`, in its order.

        Raises:
            JobError: a slot is not free, or the results do not fit the plan.
        """
        self.ensure_slots(owner.num_slots)
        found = self._found(owner, results, skip_new)
        self.slots.claim(owner.fetch, owner.fetch_slots)
        requests = self.fetch_requests(owner, skip_new=skip_new)
        by_table = {table: result for (table, _), result in zip(requests, results, strict=True)}
        tables = row_tables(owner.fetch)
        for first_table, end_table, first, end in self._width_runs(owner.fetch):
            block = slice(first, end)
            stored = [
                result.rows if result.found.all() else result.rows[result.found]
                for table, result in by_table.items()
                if first_table <= table < end_table
            ]
            hit = found[block]
            slots = owner.fetch_slots[block]
            width = self._widths[first_table]
            self._insert_stored(slots[hit], stored, width)
            self._insert_initial(slots[~hit], tables[block][~hit], owner.fetch.ids[block][~hit], first_table)
        self._inserted += len(found)
        self._initialised += int(len(found) - np.count_nonzero(found))

    def _found(self, owner: OwnerPlan, results: Sequence[ReadResult], skip_new: bool) -> NDArray[np.bool_]:
        """bool ``[len(owner.fetch)]``: the store had the row."""
        found = ~owner.fetch_new if skip_new else np.ones(len(owner.fetch), dtype=np.bool_)
        answers = [result.found for result in results]
        num_read, num_wanted = sum(map(len, answers)), int(np.count_nonzero(found))
        if num_read != num_wanted:
            raise JobError(f"the plan fetches {num_wanted} rows from the store, {num_read} were read")
        if answers:
            found[found] = np.concatenate(answers)  # rows are grouped by table on both sides, in the same order
        return found

    def _insert_stored(self, slots: Slots, parts: Sequence[NDArray[np.generic]], width: int) -> None:
        if not len(slots):
            return
        if self.device.type == "cpu":
            staging = self._staging.take(len(slots), width)
        else:  # the copy to the device may still be under way when the next one is staged
            staging = torch.empty(len(slots), width, dtype=self.dtype, pin_memory=True)
        np.concatenate(parts, out=staging.numpy())
        scatter(self._slab.records, self._index(slots), staging.to(self.device, non_blocking=True))

    def _insert_initial(self, slots: Slots, tables: NDArray[np.int32], ids: NDArray[np.int64], table: int) -> None:
        if not len(slots):
            return
        dim = self.schema.tables[table].dim
        self.kernels.initialise(self._slab.records, self._index(slots), self._index(tables), self._index(ids), dim)

    # ---- slots -> store ------------------------------------------------------------------------------------------

    def evict(self, owner: OwnerPlan) -> list[WriteRequest]:
        """Take the evicted rows out of their slots; returns those that must be written, in host memory.

        Raises:
            JobError: a slot does not hold the row the plan says.
        """
        return self.evict_in_epoch(owner)[0]

    def evict_in_epoch(self, owner: OwnerPlan) -> tuple[list[WriteRequest], int]:
        """`evict`, and the epoch of the capture in which the rows left: they are older than its moment, or not."""
        slots = owner.evict_slots
        if not len(slots):
            return [], self.capture.epoch
        self.slots.check(owner.evict, slots)
        tables = row_tables(owner.evict)
        with self.capture.lock:
            self.capture.before_release(slots)
            epoch = self.capture.epoch
            dirty = self.slots.dirty[slots]
            offsets = np.searchsorted(tables[dirty], np.arange(len(self._widths) + 1)).astype(np.int64)
            copied = self._copy_out(RowList(table_offsets=offsets, ids=owner.evict.ids[dirty]), slots[dirty])
            self.slots.release(slots)
        self._evicted += len(slots)
        self._evicted_dirty += int(np.count_nonzero(dirty))
        return copied(), epoch

    def flush(self, chunk_rows: int = FLUSH_CHUNK_ROWS) -> Generator[list[WriteRequest], None, None]:
        """All dirty rows, by table and id, at most `chunk_rows` at a time. They stay in the cache.

        A chunk's rows become clean when the next chunk is asked for: write each chunk, and have it acknowledged,
        before going on. If the caller stops because a write failed, the rows are still dirty.
        """
        dirty = self.slots.dirty_slots()
        for first in range(0, len(dirty), chunk_rows):
            slots = dirty[first : first + chunk_rows]
            yield self._read_out(self.slots.rows_at(slots, len(self._widths)), slots)
            self.slots.mark_clean(slots)

    def clear(self) -> None:
        """Forget all rows; JobError if updated rows would be lost."""
        self.slots.clear()
        self.current = None

    def _read_out(self, rows: RowList, slots: Slots) -> list[WriteRequest]:
        return self._copy_out(rows, slots)()

    def _copy_out(self, rows: RowList, slots: Slots) -> CapturedRows:
        """Copy the rows, which are ordered by table, on their device; what is returned brings them to the host."""
        blocks = [
            (run, gather(self._slab.records, self._index(slots[run[2] : run[3]]), self._widths[run[0]]))
            for run in self._width_runs(rows)
        ]
        copied = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

        def requests() -> list[WriteRequest]:
            if copied is not None:
                copied.synchronize()
            found = []
            for (first_table, end_table, first, _), block in blocks:
                host = block.cpu().numpy()
                for table in range(first_table, end_table):
                    start, stop = int(rows.table_offsets[table]), int(rows.table_offsets[table + 1])
                    if start < stop:
                        found.append(
                            WriteRequest(table=table, ids=rows.ids[start:stop], rows=host[start - first : stop - first])
                        )
            return found

        return requests

    # ---- the batch being computed --------------------------------------------------------------------------------

    def gather(self, slot_index: Tensor, dim: int, out: Tensor) -> None:
        """Copy the weights ``[n, dim]`` of the rows in these slots (int64 ``[n]``) to `out`."""
        gather(self._slab.records, slot_index, dim, out)

    def begin(self, context: StepContext, weights: Sequence[Tensor] | None = None) -> None:
        """Make the batch the one the embedding modules look up.

        Args:
            context: the batch.
            weights: per run, its rows' weights ``[U, dim]`` as other ranks gave them; None: all are in this cache.

        Raises:
            JobError: a row is not in its slot.
        """
        if weights is None:
            views = [self._own_rows(run) for run in context.runs]
        else:
            views = [
                RowView(records=rows, slot_index=None, dim=run.run.dim)
                for run, rows in zip(context.runs, weights, strict=True)
            ]
        runs = tuple(
            ActiveRun(context=run, rows=rows, kernels=self.kernels)
            for run, rows in zip(context.runs, views, strict=True)
        )
        self.current = ActiveStep(context=context, runs=runs)

    def _own_rows(self, run: RunContext) -> RowView:
        local, dim = run.local, run.run.dim
        if local is None:
            raise JobError(f"run {run.run.index} was planned for several ranks, and no rank gave its rows")
        self.slots.check(local.rows, local.slots)
        view = RowView(records=self._slab.records, slot_index=local.slot_index, dim=dim)
        if self.kernels.reads_slots:
            return view
        out = self._gathered[run.run.index].take(run.num_rows, dim)
        self.gather(local.slot_index, dim, out)
        return RowView(records=out, slot_index=None, dim=dim)

    def end(self, context: StepContext) -> tuple[ActiveRun, ...]:
        """The batch's backward is over: its runs, with the gradients that reached them.

        Raises:
            JobError: another batch was begun.
        """
        current = self.current
        if current is None or current.context is not context:
            begun = "none" if current is None else str(current.context.batch_index)
            raise JobError(f"update of batch {context.batch_index}, but the batch begun is {begun}")
        self.current = None
        for run in current.runs:
            run.closed = True
        return current.runs

    def update(self, context: StepContext, settings: RowStep) -> None:
        """Update every row that the batch's backward reached, once, and end the batch. All rows are in this cache.

        Raises:
            JobError: another batch was begun.
        """
        for run in self.end(context):
            local = run.context.local
            if run.gradients and local is not None:
                self.apply(local, gradient_terms(run, 0), settings)
            run.gradients.clear()

    def apply(self, rows: SlotRows, terms: Sequence[Terms], settings: RowStep) -> None:
        """One optimizer step for each of these rows.

        Args:
            rows: distinct rows of one run.
            terms: of their gradients.
            settings: of the optimizer.
        """
        self.capture.before_change(rows.slots)
        if len(rows.rows):
            self.kernels.update(self._slab.records, rows.slot_index, terms, settings)
        self.slots.mark_dirty(rows.slots)
        with self._count_lock:  # with several ranks, two lanes update rows
            self._updated += len(rows.rows)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _index(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device, non_blocking=True)

    def _width_runs(self, rows: RowList) -> Iterator[tuple[int, int, int, int]]:
        """(first table, end table, first row, end row) of consecutive tables with equal weights and record width."""
        first = 0
        for end in range(1, len(self._widths) + 1):
            if end == len(self._widths) or self.schema.tables[end].dim != self.schema.tables[first].dim:
                start, stop = int(rows.table_offsets[first]), int(rows.table_offsets[end])
                if start < stop:
                    yield first, end, start, stop
                first = end
