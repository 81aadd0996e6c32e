"""`RowTransfer`: copies rows between host memory and slots. `FetchRequests`: the store reads of a batch.

    FetchRequests.of(plan) ──reads──> store ──results──> found flags
    put        fetched rows, slots ──upload──> device: scatter, initial values        lane copy
    copy_out   slots ──upload──> device: gather ──> host memory, event                lanes copy, compute, push

Rule of this file: *no call waits for the device*. Uploads use staging areas; `copy_out` returns a function that waits
for its copy. Temporary device memory belongs to the stream of the calling lane and is freed immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.slots import Slab, Slots, row_tables
from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.cache.upload import Uploader, open_uploads
from bagpipe.errors import JobError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.interface import Kernels
from bagpipe.kernels.row_format import first_not_finite, host_words
from bagpipe.kernels.torch_kernels import gather, scatter
from bagpipe.oracle.plan import OwnerPlan, RowList
from bagpipe.pipeline.stream import Streams
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.types.schema import RowSchema

__all__ = ["WRITE_DEPTH", "CopiedRows", "FetchRequests", "RowTransfer"]

#: Maximal number of evicted batches without an acknowledged write-back. Bounds the write-back buffers.
WRITE_DEPTH = 4

#: Waits for copied rows to reach the host, and returns them. Any thread.
CopiedRows: TypeAlias = Callable[[], list[WriteRequest]]


@dataclass(frozen=True, slots=True)
class _TableRange:
    """Consecutive tables of one dimension, row optimizer and dtype, and the range of their rows."""

    first_table: int
    end_table: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    slot_index: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _New:
    slot_index: Tensor
    tables: Tensor
    ids: Tensor
    dim: int
    optimizer: str | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchRequests:
    """Store reads of one plan. Made once, before the read; `RowCache.insert` takes it with the results.

    Attributes:
        reads: (table number, ids int64 ``[n]``) per table with rows to read, as `Store.read_many` takes them.
        wanted: bool ``[len(owner.fetch)]``, the row is read.
        num_rows: rows read.
    """

    reads: tuple[tuple[int, NDArray[np.int64]], ...]
    wanted: NDArray[np.bool_]
    num_rows: int

    @classmethod
    def of(cls, owner: OwnerPlan, *, skip_new: bool) -> FetchRequests:
        """The reads of a plan.

        Args:
            owner: the plan.
            skip_new: leave out rows that the oracle has never planned before. An initially empty store lacks them.
        """
        fetch = owner.fetch
        wanted = ~owner.fetch_new if skip_new else np.ones(len(fetch), dtype=np.bool_)
        reads = []
        for table, (first, end) in enumerate(pairwise(fetch.table_offsets.tolist())):
            ids = fetch.ids[first:end][wanted[first:end]]
            if len(ids):
                reads.append((table, ids))
        return cls(reads=tuple(reads), wanted=wanted, num_rows=sum(len(ids) for _, ids in reads))

    def found(self, results: Sequence[ReadResult]) -> NDArray[np.bool_]:
        """bool ``[len(owner.fetch)]``: the store has the row.

        Raises:
            JobError: the results are not those of these reads.
        """
        self._check_length(results)
        found = self.wanted.copy()
        if results:
            # Both sides group rows by table, in the same order.
            found[found] = np.concatenate([result.found for result in results])
        return found

    def checks(self, results: Sequence[ReadResult]) -> NDArray[np.uint64]:
        """uint64 ``[len(owner.fetch)]``, check words of the stored rows; zero for a row the store does not have.

        Raises:
            JobError: as `found`.
        """
        checks = np.zeros(len(self.wanted), dtype=np.uint64)
        self._check_length(results)
        if results:
            checks[self.wanted] = np.concatenate([result.checks for result in results])
        return checks

    def _check_length(self, results: Sequence[ReadResult]) -> None:
        num_read = sum(len(result.found) for result in results)
        if num_read != self.num_rows:
            raise JobError(f"the plan fetches {self.num_rows} rows from the store, {num_read} were read")


class RowTransfer:
    """Copies the rows of one cache.

    Args:
        schema: schema of the rows.
        slab: records of the cache.
        streams: streams of the device.
        device: device of the slab.
        prefetch_depth: maximal number of batches in flight between fetch and insert.
    """

    def __init__(
        self, schema: RowSchema, slab: Slab, streams: Streams, device: torch.device, *, prefetch_depth: int
    ) -> None:
        compute = TORCH_DTYPE[schema.row_type.compute]
        self._schema = schema
        self._slab = slab
        self._streams = streams
        self._dtypes = [TORCH_DTYPE[schema.dtype_of(table)] for table in range(len(schema.tables))]
        self._widths = [schema.row_width(table) for table in range(len(schema.tables))]
        self._ranges = tuple(_alike_tables(schema))
        # Batch b is fetched after the insert of batch b - prefetch_depth, and evicted after the write-back of batch
        # b - WRITE_DEPTH, so its staging area is free. Snapshots in other lanes use some of the leaving areas too.
        self._arriving = open_uploads(streams, device, compute, num_areas=prefetch_depth)
        self._leaving = open_uploads(streams, device, compute, num_areas=4 * WRITE_DEPTH)

    def put(
        self,
        kernels: Kernels,
        rows: RowList,
        slots: Slots,
        found: NDArray[np.bool_],
        results: Mapping[int, ReadResult],
    ) -> None:
        """Put rows into slots. Called by one lane.

        Args:
            kernels: kernels that compute initial values.
            rows: k rows.
            slots: ``[k]``, their slots.
            found: bool ``[k]``, the row was read; otherwise it gets its initial value.
            results: results of the read, by table.
        """
        if not len(rows):
            return
        tables = row_tables(rows)
        stored: list[_Stored] = []
        new: list[_New] = []
        with self._arriving.batch() as upload:
            for span in self._table_ranges(rows):
                block = slice(span.first, span.end)
                hit = found[block]
                if hit.any():
                    stored.append(self._stored(upload, span, slots[block][hit], results))
                if not hit.all():
                    new.append(
                        _New(
                            upload.tensor(slots[block][~hit], torch.int64),
                            upload.tensor(tables[block][~hit], torch.int64),
                            upload.tensor(rows.ids[block][~hit]),
                            self._schema.tables[span.first_table].dim,
                            self._schema.tables[span.first_table].optimizer,
                            self._dtypes[span.first_table],
                        )
                    )
        for part in stored:
            scatter(self._slab.records(part.rows.dtype), part.slot_index, part.rows)
        for fresh in new:
            records = self._slab.records(fresh.dtype)
            kernels.initialise(records, fresh.slot_index, fresh.tables, fresh.ids, fresh.dim, fresh.optimizer)

    def _stored(self, upload: Uploader, span: _TableRange, slots: Slots, results: Mapping[int, ReadResult]) -> _Stored:
        parts = [
            result.rows if result.found.all() else result.rows[result.found]
            for table, result in results.items()
            if span.first_table <= table < span.end_table
        ]
        rows = upload.rows(parts, self._dtypes[span.first_table])
        return _Stored(upload.tensor(slots, torch.int64), rows)

    def copy_out(
        self, rows: RowList, slots: Slots, replaced: NDArray[np.uint64] | None = None, *, checks: bool = True
    ) -> CopiedRows:
        """Start copying rows, ordered by table, to the host; the returned function waits for them. Under one lock.

        Args:
            rows: k rows.
            slots: ``[k]``, their slots.
            replaced: ``[k]``, see `WriteRequest`.
            checks: the returned function raises JobError if a row is not finite: whoever waits for rows stores them.
        """
        ranges = list(self._table_ranges(rows))
        blocks: list[PendingTensor] = []
        if ranges:
            with self._leaving.batch() as upload:
                indices = [upload.tensor(slots[span.first : span.end], torch.int64) for span in ranges]
            for span, index in zip(ranges, indices, strict=True):
                records = self._slab.records(self._dtypes[span.first_table])
                blocks.append(to_host(self._streams, gather(records, index, self._widths[span.first_table])))

        def requests() -> list[WriteRequest]:
            found = []
            for span, block in zip(ranges, blocks, strict=True):
                host = host_words(block.get())
                if checks:
                    self._check_finite(rows, span, host)
                for table in range(span.first_table, span.end_table):
                    start, stop = int(rows.table_offsets[table]), int(rows.table_offsets[table + 1])
                    if start < stop:
                        part = host[start - span.first : stop - span.first]
                        words = None if replaced is None else replaced[start:stop]
                        found.append(WriteRequest(table=table, ids=rows.ids[start:stop], rows=part, replaced=words))
            return found

        return requests

    def _check_finite(self, rows: RowList, span: _TableRange, host: NDArray[Any]) -> None:
        """On the host: no lane waits for the device, and rows that are not stored cost nothing."""
        schema, first = self._schema, span.first_table
        dtype = schema.dtype_of(first)
        position = first_not_finite(host, dtype, schema.tables[first].dim, schema.optimizer_of(first))
        if position is not None:
            place = span.first + position
            table = int(np.searchsorted(rows.table_offsets, place, side="right")) - 1
            raise JobError(
                f"table {schema.tables[table].name} id {int(rows.ids[place])}: an update made weights or state "
                f"of the row that are not finite in {dtype}; it is not stored. Lower the learning rate of rows"
            )

    def _table_ranges(self, rows: RowList) -> Iterator[_TableRange]:
        for first, end in self._ranges:
            start, stop = int(rows.table_offsets[first]), int(rows.table_offsets[end])
            if start < stop:
                yield _TableRange(first, end, start, stop)


def _alike_tables(schema: RowSchema) -> Iterator[tuple[int, int]]:
    """Half-open ranges of consecutive tables of one dimension, row optimizer and dtype."""
    first, kinds = 0, [(table.dim, table.optimizer, table.dtype) for table in schema.tables]
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[first]:
            yield first, end
            first = end
