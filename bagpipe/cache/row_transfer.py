"""`RowTransfer`: rows between host memory and the slots of a slab.

    put        fetched rows, slots ──upload──> device: scatter, initial values        lane copy
    copy_out   slots ──upload──> device: gather ──> host memory, its event            lanes copy, compute, push

Rule of this file: *nothing waits for the device*. Uploads go through staging areas; what leaves is on its way to the
host when `copy_out` returns, and whoever calls its result waits for it. Memory of the device that is used in between
belongs to the calling lane's stream, and is given back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

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
from bagpipe.kernels.row_format import host_words
from bagpipe.kernels.torch_kernels import gather, scatter
from bagpipe.oracle.plan import OwnerPlan, RowList
from bagpipe.pipeline.stream import Streams
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.types.schema import RowSchema

__all__ = ["WRITE_DEPTH", "CopiedRows", "FetchRequests", "RowTransfer"]

#: Batches evicted and not yet acknowledged by the store, at most: bounds the write-back buffers.
WRITE_DEPTH = 4

#: Brings copied rows to the host. Any thread.
CopiedRows: TypeAlias = Callable[[], list[WriteRequest]]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tables with equal weights and record width, and their rows."""

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
        answers = [result.found for result in results]
        num_read = sum(map(len, answers))
        if num_read != self.num_rows:
            raise JobError(f"the plan fetches {self.num_rows} rows from the store, {num_read} were read")
        found = self.wanted.copy()
        if answers:
            found[found] = np.concatenate(answers)  # both sides group rows by table, in the same order
        return found


class RowTransfer:
    """Moves one cache's rows.

    Args:
        schema: of the rows.
        slab: where they live.
        streams: of the slab's device.
        device: of the slab.
        prefetch_depth: batches whose rows may be on their way to their slots.
    """

    def __init__(
        self, schema: RowSchema, slab: Slab, streams: Streams, device: torch.device, *, prefetch_depth: int
    ) -> None:
        dtype = TORCH_DTYPE[schema.row_type.compute]
        self._schema = schema
        self._slab = slab
        self._streams = streams
        self._dtype = TORCH_DTYPE[schema.dtype]
        self._widths = [schema.row_width(table) for table in range(len(schema.tables))]
        # A batch is fetched when the one `prefetch_depth` before it is in its slots, evicted when the one `WRITE_DEPTH`
        # before it is stored: so their areas are free again. Captures of other lanes take some of the latter, too.
        self._arriving = open_uploads(streams, device, dtype, num_areas=prefetch_depth)
        self._leaving = open_uploads(streams, device, dtype, num_areas=4 * WRITE_DEPTH)

    def put(
        self,
        kernels: Kernels,
        rows: RowList,
        slots: Slots,
        found: NDArray[np.bool_],
        results: Mapping[int, ReadResult],
    ) -> None:
        """Put rows into slots. Of one lane.

        Args:
            kernels: make initial values.
            rows: k rows.
            slots: ``[k]``, theirs.
            found: bool ``[k]``, the row was read; otherwise it gets its initial value.
            results: what was read, by table.
        """
        if not len(rows):
            return
        tables = row_tables(rows)
        stored: list[_Stored] = []
        new: list[_New] = []
        with self._arriving.batch() as upload:
            for run in self._runs(rows):
                block = slice(run.first, run.end)
                hit = found[block]
                if hit.any():
                    stored.append(self._stored(upload, run, slots[block][hit], results))
                if not hit.all():
                    new.append(
                        _New(
                            upload.tensor(slots[block][~hit], torch.int64),
                            upload.tensor(tables[block][~hit], torch.int64),
                            upload.tensor(rows.ids[block][~hit]),
                            self._schema.tables[run.first_table].dim,
                        )
                    )
        records = self._slab.records
        for part in stored:
            scatter(records, part.slot_index, part.rows)
        for fresh in new:
            kernels.initialise(records, fresh.slot_index, fresh.tables, fresh.ids, fresh.dim)

    def _stored(self, upload: Uploader, run: _Run, slots: Slots, results: Mapping[int, ReadResult]) -> _Stored:
        parts = [
            result.rows if result.found.all() else result.rows[result.found]
            for table, result in results.items()
            if run.first_table <= table < run.end_table
        ]
        host, rows = upload.block(len(slots), self._widths[run.first_table], self._dtype)
        np.concatenate(parts, out=host_words(host))
        return _Stored(upload.tensor(slots, torch.int64), rows)

    def copy_out(self, rows: RowList, slots: Slots) -> CopiedRows:
        """Copy the rows, which are ordered by table; what is returned brings them to the host. Under one lock."""
        runs = list(self._runs(rows))
        blocks: list[PendingTensor] = []
        if runs:
            with self._leaving.batch() as upload:
                indices = [upload.tensor(slots[run.first : run.end], torch.int64) for run in runs]
            blocks = [
                to_host(self._streams, gather(self._slab.records, index, self._widths[run.first_table]))
                for run, index in zip(runs, indices, strict=True)
            ]

        def requests() -> list[WriteRequest]:
            found = []
            for run, block in zip(runs, blocks, strict=True):
                host = host_words(block.get())
                for table in range(run.first_table, run.end_table):
                    start, stop = int(rows.table_offsets[table]), int(rows.table_offsets[table + 1])
                    if start < stop:
                        part = host[start - run.first : stop - run.first]
                        found.append(WriteRequest(table=table, ids=rows.ids[start:stop], rows=part))
            return found

        return requests

    def _runs(self, rows: RowList) -> Iterator[_Run]:
        first, tables = 0, self._schema.tables
        for end in range(1, len(tables) + 1):
            if end == len(tables) or tables[end].dim != tables[first].dim:
                start, stop = int(rows.table_offsets[first]), int(rows.table_offsets[end])
                if start < stop:
                    yield _Run(first, end, start, stop)
                first = end
