"""`RowCache`: the row records of one rank on its device, and the operations of the lanes on them.

    lane copy:    evict(owner) ─> WriteRequest…      insert(owner, requests, results)
    lane compute: begin(context) ─> model forward, backward ─> update(context, …)   with several ranks: `RowExchange`
    at the end:   flush() ─> WriteRequest…           clear()

Rule of this file: *a lane touches only the slots of its plan*. `insert` of batch b + 1 can run in another thread while
batch b computes; `evict` requires that the update of `OwnerPlan.evict_after` is done; growing requires idle lanes.
A row is dirty from its update until it is handed out for write-back. Clean rows are never written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, GroupContext
from bagpipe.cache.cache_statistics import CacheStatistics
from bagpipe.cache.earlier_rows import EarlierRows
from bagpipe.cache.lookup import ActiveBatch, ActiveTableGroup
from bagpipe.cache.lookup_layout import TableGroup
from bagpipe.cache.reached_rows import reached_rows, with_touched_rows
from bagpipe.cache.row_history import RowHistory
from bagpipe.cache.row_transfer import CopiedRows, FetchRequests, RowTransfer
from bagpipe.cache.slots import Slab, Slots, SlotTable, row_tables
from bagpipe.cache.snapshot import RowSnapshot
from bagpipe.cache.staging import Scratch
from bagpipe.cache.upload import SlotRows, Uploads, open_uploads
from bagpipe.cache.verdicts import Verdicts
from bagpipe.errors import InputError, JobError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.interface import Gradients, Kernels, RowSteps, RowView, step_of
from bagpipe.kernels.select import select_kernels
from bagpipe.kernels.torch_kernels import gather
from bagpipe.oracle.plan import OwnerPlan, RowList
from bagpipe.pipeline.devices import open_streams
from bagpipe.pipeline.stream import Streams
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.store.row_checksum import table_check_words
from bagpipe.types.schema import RowSchema, RowTable

__all__ = ["RowCache"]

#: Rows of one flush chunk: 16 MiB of 256-byte records, so that the host copy stays small compared with the cache.
FLUSH_CHUNK_ROWS = 65_536


class RowCache:
    """The rows of one rank.

    Args:
        schema: tables, optimizers, dtypes and seed.
        num_slots: capacity in rows; 0 (direct mode): grows to what the plans need.
        device: device of the rows.
        streams: streams of the device; default: those of its kind.
        prefetch_depth: maximal number of batches in flight between fetch and insert.
        kernels: kernels for the schema and the device; default: the choice of `select_kernels`.
        batches_begun: most batches begun and not ended: 2 if a lookup precedes the update of the batch before.
        grows: slots are made when plans use them, up to `num_slots`; on a host they take memory only then.
        is_partial: backwards are partial: rows that no gradient reached are not updated (`reached_rows`).

    Attributes:
        kernels, is_partial, streams: as given, or the default.
        slots: slot bookkeeping.
        history: decay that is applied to rows when they are read; shared with the cache of an evaluation.
        earlier: weights that the first batch of a run reads instead of those in the slots, if it is behind them.
        dtype: of vectors and gradients; that of the records of a table can be narrower (`row_dtype`).
        num_slots_used: most slots that the plans have used so far.
        current: the batch being computed, which embedding modules read.
        snapshot: copy-on-write snapshots for checkpoints.
        verdicts: of the batches under way, such as whether the model has looked up their own ids.
    """

    def __init__(
        self,
        schema: RowSchema,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        streams: Streams | None = None,
        prefetch_depth: int = 4,
        kernels: Kernels | None = None,
        batches_begun: int = 1,
        grows: bool = False,
        is_partial: bool = False,
    ) -> None:
        self.schema, self.is_partial = schema, is_partial
        self.device = torch.device(device)
        self.streams: Streams = open_streams(str(device)) if streams is None else streams
        self.dtype = TORCH_DTYPE[schema.row_type.compute]
        self.slots = SlotTable(0 if grows else num_slots, num_slots)
        self.verdicts = Verdicts()
        self.history = RowHistory(schema, self.device)
        self.earlier = EarlierRows(schema, self.slots)
        self.num_slots_used = 0
        self.current: ActiveBatch | None = None
        self._begun: deque[ActiveBatch] = deque(maxlen=batches_begun)  # and not ended; of an evaluation, the latest
        self._fixed = num_slots > 0
        self.kernels: Kernels = select_kernels(schema, self.device) if kernels is None else kernels
        widest = max((schema.row_bytes(table) for table in range(len(schema.tables))), default=1)
        self._slab = Slab(num_slots, widest, self.device)
        self._gathered = [[Scratch(self.device) for _ in schema.tables] for _ in range(batches_begun)]
        self._transfer = RowTransfer(schema, self._slab, self.streams, self.device, prefetch_depth=prefetch_depth)
        self._inserted = self._initialised = self._evicted = self._evicted_dirty = self._updated = 0
        self._count_lock = threading.Lock()
        self.snapshot = RowSnapshot(self.slots, len(schema.tables), widest, self._transfer.copy_out, self.streams)

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

    def check_tables(self, tables: tuple[RowTable, ...]) -> None:
        """Check that a model with these tables can read from this cache.

        Raises:
            InputError: the cache was created for other tables.
        """
        if self.schema.tables != tables:
            expected, got = ([table.name for table in found] for found in (tables, self.schema.tables))
            raise InputError(f"expected a cache for tables {expected}, got one for {got} or for other dimensions")

    def uploads(self, num_areas: int) -> Uploads:
        """Uploads of batches that read these rows, for one lane.

        Args:
            num_areas: maximal number of batches with pending copies.
        """
        names, max_terms = self.kernels.needs_names, self.kernels.max_terms
        return open_uploads(
            self.streams, self.device, self.dtype, num_areas=num_areas, names=names, max_terms=max_terms
        )

    def row_dtype(self, group: TableGroup) -> torch.dtype:
        """Dtype of the records of a table group."""
        return TORCH_DTYPE[group.dtype or self.schema.dtype]

    @property
    def is_fixed(self) -> bool:
        """The number of slots is fixed: the cache is not in direct mode."""
        return self._fixed

    def ensure_slots(self, num_slots: int) -> None:
        """Make room for `num_slots` rows. In direct mode the slab grows, which requires idle lanes.

        Raises:
            JobError: the cache has a fixed, smaller number of slots.
        """
        self.num_slots_used = max(self.num_slots_used, num_slots)
        if num_slots <= len(self.slots):
            return
        if self._fixed:
            if num_slots > len(self._slab):
                raise JobError(f"the plan uses {num_slots} slots, the cache has {len(self._slab)}")
            with self.snapshot.lock:
                self.slots.grow(num_slots)
            return
        # A quarter more: batch sizes vary, and each growth copies the slab.
        num_slots += num_slots // 4
        self._slab.grow(num_slots)
        self.slots.grow(num_slots)

    # ---- store -> slots ------------------------------------------------------------------------------------------

    def insert(self, owner: OwnerPlan, requests: FetchRequests, results: Sequence[ReadResult]) -> None:
        """Put fetched rows into their slots. A row that was not read or not found gets its initial value.

        Args:
            owner: the plan.
            requests: its store reads.
            results: the answers, in the order of `requests.reads`.

        Raises:
            JobError: a slot is not free, or the results do not match the requests.
        """
        self.ensure_slots(owner.num_slots)
        found = requests.found(results)
        self.slots.claim(owner.fetch, owner.fetch_slots, requests.checks(results))
        by_table = {table: result for (table, _), result in zip(requests.reads, results, strict=True)}
        self._transfer.put(self.kernels, owner.fetch, owner.fetch_slots, found, by_table)
        self._inserted += len(found)
        self._initialised += int(len(found) - np.count_nonzero(found))

    # ---- slots -> store ------------------------------------------------------------------------------------------

    def evict(self, owner: OwnerPlan) -> list[WriteRequest]:
        """Free the slots of the evicted rows; returns write requests for the dirty ones, in host memory.

        Raises:
            JobError: a slot does not hold the planned row.
        """
        return self.evict_in_epoch(owner)[0]()

    def evict_in_epoch(self, owner: OwnerPlan) -> tuple[CopiedRows, int]:
        """`evict` without waiting for the copies.

        Returns:
            A function that waits for the copies and returns the write requests; and the snapshot epoch in which the
            rows left, which says whether they precede a snapshot.
        """
        self.snapshot.drop(owner)
        slots = owner.evict_slots
        if not len(slots):
            return list, self.snapshot.epoch
        self.slots.check(owner.evict, slots)
        tables = row_tables(owner.evict)
        with self.snapshot.lock:
            self.snapshot.before_release(slots)
            epoch = self.snapshot.epoch
            dirty = self.slots.dirty[slots]
            offsets = np.searchsorted(tables[dirty], np.arange(len(self.schema.tables) + 1)).astype(np.int64)
            copied = self._transfer.copy_out(
                RowList(table_offsets=offsets, ids=owner.evict.ids[dirty]),
                slots[dirty],
                self.slots.stored_checks[slots[dirty]],
            )
            self.slots.release(slots)
        self._evicted += len(slots)
        self._evicted_dirty += int(np.count_nonzero(dirty))
        return copied, epoch

    def flush(self, chunk_rows: int = FLUSH_CHUNK_ROWS) -> Generator[list[WriteRequest], None, None]:
        """Yield write requests for all dirty rows, by table and id, at most `chunk_rows` at a time. Rows stay resident.

        The rows of a chunk become clean when the next chunk is requested: the caller writes a chunk and waits for the
        acknowledgement before it continues. After a failed write, the rows are still dirty.
        """
        dirty = self.slots.dirty_slots()
        for first in range(0, len(dirty), chunk_rows):
            slots = dirty[first : first + chunk_rows]
            with self.snapshot.lock:
                rows = self.slots.rows_at(slots, len(self.schema.tables))
                copied = self._transfer.copy_out(rows, slots, self.slots.stored_checks[slots])
            requests = copied()
            yield requests
            # The requests hold the rows in the order of the slots.
            words = [table_check_words(request.table, request.ids, request.rows) for request in requests]
            self.slots.mark_clean(slots, np.concatenate(words))

    def copy_rows(self, rows: RowList, slots: Slots) -> list[WriteRequest]:
        """Copies on the host of the rows in slots, ordered by table. Nothing changes. Requires idle lanes."""
        with self.snapshot.lock:
            return self._transfer.copy_out(rows, slots, checks=False)()

    def clear(self) -> None:
        """Drop all rows.

        Raises:
            JobError: updated rows would be lost.
        """
        self.slots.clear()
        self.current = None
        self._begun.clear()

    # ---- the batch being computed --------------------------------------------------------------------------------

    def read(self, group: TableGroup, slot_index: Tensor, out: Tensor, step: int | None = None) -> None:
        """Copy the weights of rows of a group as they are before a batch. The rows in the slots do not change.

        Args:
            group: the table group.
            slot_index: int64 ``[n]``, slots of the rows.
            out: ``[n, dim]``, of their dtype.
            step: number of the batch; None: the next one that is trained.
        """
        records, table = self._slab.records(out.dtype), group.first_table
        missed = self.history.missed(table, step)
        if missed is not None and missed.table.needs_state:
            rows = gather(records, slot_index, self.schema.row_width(table))
            missed.apply(rows, group.dim, self.history.steps_of(table, rows).long())
            out.copy_(rows[:, : group.dim])
            return
        gather(records, slot_index, group.dim, out)
        if missed is not None:
            steps = self.history.steps_of(table, records).index_select(0, slot_index)
            missed.apply(out, group.dim, steps.long())
        if self.earlier.is_read_by(step):  # rows that decay are never behind
            self.earlier.apply(slot_index, out)

    def check(self, context: BatchContext) -> None:
        """Check that the batch's rows are in their slots, with one rank. The lane that inserts has the millisecond.

        Raises:
            JobError: a row is not in its slot.
        """
        for group in context.groups:
            if group.local is not None:
                self.slots.check(group.local.rows, group.local.slots)

    def begin(
        self, context: BatchContext, weights: Sequence[Tensor] | None = None, *, step: int | None = None
    ) -> tuple[ActiveTableGroup, ...]:
        """Make the batch the one that embedding modules look up.

        Args:
            context: the batch.
            weights: per group, the weights ``[U, dim]`` received from the owners; None: all rows are in this cache.
            step: see `read`.

        Returns:
            Its table groups, which gradients reach in the backward.

        Raises:
            JobError: the batch was planned for several ranks and has no weights.
        """
        if weights is None:
            views = [self._own_rows(group, step, context.batch_index) for group in context.groups]
        else:
            views = [
                RowView(records=rows, slot_index=None, dim=group.tables.dim)
                for group, rows in zip(context.groups, weights, strict=True)
            ]
        groups = tuple(
            ActiveTableGroup(context=group, rows=rows, dtype=self.dtype, kernels=self.kernels)
            for group, rows in zip(context.groups, views, strict=True)
        )
        self.current = ActiveBatch(context=context, groups=groups, versions=context.versions)
        self._begun.append(self.current)
        return groups

    def _own_rows(self, group: GroupContext, step: int | None, batch_index: int) -> RowView:
        local, dim, dtype = group.local, group.tables.dim, self.row_dtype(group.tables)
        if local is None:
            raise JobError(f"table group {group.tables.index} was planned for several ranks, but has no exchanged rows")
        view = RowView(records=self._slab.records(dtype), slot_index=local.slot_index, dim=dim)
        # Gradients of per-id weights need the rows of the lookup, which may change before; earlier rows have no slots.
        changes = len(self._gathered) > 1 and (group.tables.lookup.weighted or self.earlier.is_read_by(step))
        if self.kernels.reads_slots and group.tables.first_table not in self.history.decaying and not changes:
            return view
        out = self._gathered[batch_index % len(self._gathered)][group.tables.index].take(group.num_rows, dim, dtype)
        self.read(group.tables, local.slot_index, out, step)
        return RowView(records=out, slot_index=None, dim=dim)

    def end(self, context: BatchContext) -> tuple[ActiveTableGroup, ...]:
        """End the batch after its backward; returns its groups, with their gradients.

        Raises:
            JobError: the batch is not begun.
        """
        ended = next((batch for batch in self._begun if batch.context is context), None)
        if ended is None:
            begun = ", ".join(str(batch.context.batch_index) for batch in self._begun) or "none"
            raise JobError(f"update of batch {context.batch_index}, but the batch begun is {begun}")
        self._begun.remove(ended)
        self.current = None if self.current is ended else self.current
        return ended.close()

    def update(self, context: BatchContext, settings: RowSteps) -> None:
        """Update each row that a lookup has once, and end the batch. All rows are in this cache.

        Args:
            context: the batch.
            settings: of the optimizers.

        Raises:
            JobError: the batch is not begun.
        """
        for group in self.end(context):
            local = group.context.local
            if group.gradients and local is not None:
                rows, gradients = with_touched_rows(self.kernels, local, group)
                self.apply(group.context.tables, rows, gradients, settings)
                if rows is not local:  # plans expect the others in the store, too
                    self.snapshot.before_change(local.slots)
                    self.slots.mark_dirty(local.slots)
            group.gradients.clear()

    def apply(self, group: TableGroup, rows: SlotRows, gradients: Sequence[Gradients], settings: RowSteps) -> None:
        """Apply one optimizer step to each row.

        Args:
            group: a table group that is not frozen.
            rows: distinct rows of the group.
            gradients: their gradients, one entry per lookup.
            settings: of the optimizers.
        """
        step = step_of(settings, group.index)
        if self.is_partial and len(rows.rows):
            rows, gradients = reached_rows(self.kernels, rows, gradients)
        self.snapshot.before_change(rows.slots)
        if len(rows.rows):
            records = self._slab.records(self.row_dtype(group))
            self.kernels.update(records, rows.slot_index, gradients, step, rows.names, group.optimizer)
        self.slots.mark_dirty(rows.slots)
        with self._count_lock:  # with several ranks, two lanes update rows
            self._updated += len(rows.rows)
