"""`ProcessStore`: the client of a store in a process of its own, outside the interpreter lock of the training process.

    training process                                    child (`bagpipe.store.process.child`)
    ids, rows ──copy──> region of shared memory ──────> client of the store: encode, send, receive, decode
    ReadResult = views of the region <───────────────── rows, found, check words
               request, reply: one packet each

A thread of the training process that waits for a reply holds no lock, so what is left of an exchange in its interpreter
is a copy of the ids and one wake-up. Calls that are rare (schema record, ledger, lists of ids) are made in the training
process itself, over connections of their own.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest, ReadResult, Rows, StoreStatistics, WriteRequest
from bagpipe.store.process.child import HEADER_BYTES
from bagpipe.store.process.messages import COUNTS, Kind
from bagpipe.store.process.parent import Child, StartProcess, start_process
from bagpipe.store.process.region import Layout, Region
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.row_sums import RowSums
from bagpipe.store.validation import check_deletion, check_read, check_write
from bagpipe.types.schema import RowSchema
from bagpipe.util.failpoints import hit

__all__ = ["REGION_BYTES", "ProcessStore"]

#: Bytes of a region. Larger exchanges take place in several parts. Only what is used takes memory.
REGION_BYTES = 16 << 20
#: Regions of reads. One is free again when nobody has an array of its results.
_READ_REGIONS = 6
#: The region of reads whose results are copied, and that of writes.
_COPIED, _WRITTEN = _READ_REGIONS, _READ_REGIONS + 1
_NUM_REGIONS = _READ_REGIONS + 2

_Word = TypeVar("_Word", np.int64, np.uint64)


class ProcessStore:
    """A store with its client in a process of its own. See `bagpipe.store.interface.Store`.

    Args:
        urls, schema, namespace, num_buckets, timeout_s, durability: as for `RedisStore`.
        region_bytes: size of a region of shared memory.
        start: starts the process.

    Raises:
        InputError: as for `RedisStore`. `__enter__` raises what entering the store in the child raises.
        StoreError: any call: the process has ended, or has been stopped for `timeout_s`.
    """

    def __init__(
        self,
        urls: str,
        *,
        schema: RowSchema,
        namespace: str = "bagpipe",
        num_buckets: int = 64,
        timeout_s: float = 30.0,
        durability: str = "memory",
        region_bytes: int = REGION_BYTES,
        start: StartProcess = start_process,
    ) -> None:
        given: dict[str, Any] = {
            "urls": urls,
            "namespace": namespace,
            "num_buckets": num_buckets,
            "timeout_s": timeout_s,
            "durability": durability,
        }
        # Not entered: it has no connection of its own for rows.
        self._rare = RedisStore(schema=schema, **given)
        self.schema = schema
        self._given = {"schema": schema.to_json(), "store": given, "region_bytes": region_bytes}
        self._layout = Layout(schema, region_bytes)
        if region_bytes < 8 * num_buckets:
            raise ValueError(f"a region of {region_bytes} bytes holds no number for each of {num_buckets} buckets")
        self._timeout_s = timeout_s
        self._start = start
        self._child: Child | None = None
        self._fence: Fence | None = None
        self._latest = {"read": StoreStatistics(), "write": StoreStatistics()}  # of the latest reply to each thread
        self._num_buckets = num_buckets
        #: By region, its memory while an array of its results is in use.
        self._held: list[Callable[[], NDArray[np.uint8] | None]] = [_nobody] * _READ_REGIONS

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        return None if self._child is None else self._child.process.pid

    def __enter__(self) -> Self:
        if self._child is not None:
            raise RuntimeError("the store is already open")
        child = Child(
            HEADER_BYTES + _NUM_REGIONS * self._layout.region_bytes, stopped_s=self._timeout_s, start=self._start
        )
        try:
            size = child.put_json(HEADER_BYTES, self._given)
            self._ask(child, child.reading, Kind.OPEN, size=size)
            if self._fence is not None:
                self._send_fence(child, self._fence)
        except BaseException:
            child.close()
            raise
        self._child, self._held = child, [_nobody] * _READ_REGIONS
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """See `Store.check`."""
        return self._rare.check(reloads=reloads, resets=resets)

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`."""
        return self._rare.claim(reloads=reloads)

    def reset(self, token: str) -> None:
        """See `Store.reset`."""
        self._rare.reset(token)

    def ledger(self) -> Ledger:
        """See `Store.ledger`."""
        return self._rare.ledger()

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        return self._rare.ids(table)

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store.ids_by_table`."""
        return self._rare.ids_by_table(tables)

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """See `Store.read`."""
        return self.read_many([(table, ids)])[0]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`. The arrays can be views of shared memory, which is theirs until they are dropped."""
        child = self._opened()
        asked = [(table, check_read(self.schema, table, ids)) for table, ids in requests]
        exchanges = [*self._layout.exchanges([table for table, _ in asked], [len(ids) for _, ids in asked])]
        free = next((number for number, held in enumerate(self._held) if held() is None), None)
        if len(exchanges) == 1 and free is not None:
            region = self._read(child, free, [(table, ids, False) for table, ids in asked])
            self._held[free] = weakref.ref(region.memory)
            return region.results()
        parts: list[list[ReadResult]] = [[] for _ in asked]
        for pieces in exchanges:
            part = [(asked[piece.request][0], asked[piece.request][1][piece.rows], False) for piece in pieces]
            for piece, result in zip(pieces, self._read(child, _COPIED, part).results(), strict=True):
                copied = ReadResult(result.rows.copy(), result.found.copy(), result.checks.copy())
                parts[piece.request].append(copied)
        return [self._joined(table, found) for (table, _), found in zip(asked, parts, strict=True)]

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """See `Store.write`."""
        self.write_many([WriteRequest(table, ids, rows)])

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """See `Store.write_many`."""
        child = self._opened()
        hit("before-write-back")
        for request in requests:
            check_write(self.schema, request)
        for pieces in self._layout.exchanges([r.table for r in requests], [len(r.ids) for r in requests]):
            part = [_rows_of(requests[piece.request], piece.rows) for piece in pieces]
            entries = [(request.table, request.ids, request.replaced is not None) for request in part]
            self._region(child, child.writing, _WRITTEN, entries).put_writes(part)
            self._ask(child, child.writing, Kind.WRITE, _WRITTEN, len(part))
        hit("after-write-back")

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        """See `Store.delete_many`."""
        child = self._opened()
        deletions = check_deletion(self.schema, requests)
        for pieces in self._layout.exchanges([table for table, _ in deletions], [len(ids) for _, ids in deletions]):
            part = [(deletions[piece.request][0], deletions[piece.request][1][piece.rows], False) for piece in pieces]
            self._region(child, child.writing, _WRITTEN, part)
            self._ask(child, child.writing, Kind.DELETE, _WRITTEN, len(part))

    def fence(self, fence: Fence) -> None:
        """See `Store.fence`."""
        self._rare.fence(fence)
        self._fence = fence
        if self._child is not None:
            self._send_fence(self._child, fence)

    def rotate(self) -> NDArray[np.int64]:
        """See `Store.rotate`."""
        return self._by_bucket(self._opened(), Kind.ROTATE, np.int64)

    def sum_changes(self) -> RowSums:
        """See `Store.sum_changes`."""
        sums = RowSums(self._num_buckets)
        sums.values[:] = self._by_bucket(self._opened(), Kind.SUMS, np.uint64)
        return sums

    def statistics(self) -> StoreStatistics:
        """See `Store.statistics`. As of the latest reply."""
        either = zip(*map(astuple, self._latest.values()), strict=True)  # the later counts are the larger ones
        return StoreStatistics(**dict(zip(COUNTS, map(max, either), strict=True)))

    def _opened(self) -> Child:
        if self._child is None:
            raise StoreError("the store is not open: use it in a with statement")
        return self._child

    def _region(
        self, child: Child, end: socket.socket, number: int, entries: Sequence[tuple[int, NDArray[np.int64], bool]]
    ) -> Region:
        """A region with the ids of an exchange."""
        child.settle(end)
        counted = [(table, len(ids), is_known) for table, ids, is_known in entries]
        region = Region(self._layout, child.memory(self._start_of(number), self._layout.region_bytes), counted)
        if entries:
            np.concatenate([ids for _, ids, _ in entries], out=region.ids)
        return region

    def _start_of(self, number: int) -> int:
        return HEADER_BYTES + number * self._layout.region_bytes

    def _read(self, child: Child, number: int, entries: Sequence[tuple[int, NDArray[np.int64], bool]]) -> Region:
        region = self._region(child, child.reading, number, entries)
        try:
            self._ask(child, child.reading, Kind.READ, number, len(entries))
        except BaseException:
            del region  # the traceback would keep the memory
            raise
        return region

    def _send_fence(self, child: Child, fence: Fence) -> None:
        child.settle(child.writing)
        size = child.put_json(self._start_of(_WRITTEN), asdict(fence))
        self._ask(child, child.writing, Kind.FENCE, _WRITTEN, size)

    def _by_bucket(self, child: Child, kind: Kind, dtype: type[_Word]) -> NDArray[_Word]:
        """A number for each bucket."""
        self._ask(child, child.writing, kind, _WRITTEN)
        return child.memory(self._start_of(_WRITTEN), 8 * self._num_buckets).view(dtype).copy()

    def _ask(self, child: Child, end: socket.socket, kind: Kind, region: int = 0, size: int = 0) -> None:
        """Make a request. Raises its error, or that of `Child.ask`."""
        reply = child.ask(end, kind, region, size)
        self._latest["read" if end is child.reading else "write"] = reply.statistics
        if reply.error is not None:
            raise reply.error

    def _joined(self, table: int, parts: Sequence[ReadResult]) -> ReadResult:
        """One result of the parts of a request."""
        none = np.zeros((0, self._layout.widths[table]), self._layout.dtypes[table])
        return ReadResult(
            np.concatenate([none, *(part.rows for part in parts)]),
            np.concatenate([np.zeros(0, np.bool_), *(part.found for part in parts)]),
            np.concatenate([np.zeros(0, np.uint64), *(part.checks for part in parts)]),
        )


def _nobody() -> None:
    """Of a region whose results nobody has."""


def _rows_of(request: WriteRequest, rows: slice) -> WriteRequest:
    replaced = None if request.replaced is None else request.replaced[rows]
    return WriteRequest(request.table, request.ids[rows], request.rows[rows], replaced)
