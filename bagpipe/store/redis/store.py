"""`RedisStore`: rows in bucket hashes of one or several Redis-protocol servers, or of a Redis Cluster.

    read_many   see `bagpipe.store.redis.row_reader`
    write_many  the same way with HSET; returns when every server has acknowledged every row
    delete_many reads the check words of the rows, then HDEL
    fence       all further HSETs and HDELs are guarded and logged; rotate: checks every bucket's log and opens the next
    check/claim the schema record of every server (of the cluster), compared field by field

One shard client for reading and one for writing, so that a reader thread and a writer thread never share a socket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import FencedError, InputError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.fencing.writer_logs import WriterLogs
from bagpipe.store.interface import DeleteRequest, ReadResult, Rows, StoreStatistics, WriteRequest
from bagpipe.store.keys import FIELD_BYTES, bucket_key, check_layout
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.delete_codec import DeleteGroup, batches_of
from bagpipe.store.redis.ledger import RedisLedger
from bagpipe.store.redis.namespace import Backend, Namespace
from bagpipe.store.redis.row_codecs import LogRotation, WriteGroup
from bagpipe.store.redis.row_reader import RowReader, by_width, reading_client
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls
from bagpipe.store.redis.writing_client import Change, writing_client
from bagpipe.store.row_checksum import as_voids
from bagpipe.store.row_sums import RowSums
from bagpipe.store.validation import check_deletion, check_read, check_write
from bagpipe.types.schema import RowSchema
from bagpipe.util.failpoints import hit

__all__ = ["RedisStore"]

#: Rows deleted at a time: 16 MiB of 256-byte records are read for their check words.
_DELETED_ROWS = 65_536


class RedisStore:
    """A namespace of rows on Redis-protocol servers. See `bagpipe.store.interface.Store`.

    Args:
        urls: redis://, rediss:// or unix:// URLs separated by commas, whose order is part of the namespace; or one
            redis+cluster:// or rediss+cluster:// URL.
        schema: tables, row widths and dtype.
        namespace: prefix of all keys.
        num_buckets: bucket hashes of the namespace, a power of two, at least one per server.
        timeout_s: deadline of one batch, and of every connection attempt.
        durability: what acknowledged rows survive, see `bagpipe.store.redis.server_checks`.

    Raises:
        InputError: an invalid URL, namespace or number of buckets. `__enter__` raises it for a server that is
            unreachable, refuses the user, speaks another protocol, can evict rows, or is not durable enough.
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
    ) -> None:
        check_layout(namespace, num_buckets)
        if not timeout_s > 0:
            raise InputError(f"store.timeout_s must be greater than 0, got {timeout_s}")
        self.schema = schema
        keys = self._keys = [bucket_key(namespace, bucket) for bucket in range(num_buckets)]
        if is_cluster_url(urls):
            cluster = Cluster(seeds=parse_cluster_url(urls))
            backends: tuple[Backend, ...] = (cluster,)
            self._reading = reading_client(cluster, keys, timeout_s)
            self._writing = writing_client(cluster, keys, timeout_s)
        else:
            backends = servers = parse_urls(urls)
            if len(servers) > num_buckets:
                raise InputError(f"store.buckets = {num_buckets} is fewer than the {len(servers)} servers of store.url")
            self._reading = reading_client(servers, keys, timeout_s)
            self._writing = writing_client(servers, keys, timeout_s)
        self._namespace = Namespace(
            name=namespace,
            schema=schema,
            num_buckets=num_buckets,
            backends=backends,
            timeout_s=timeout_s,
            durability=durability,
        )
        self._reader = RowReader(self._reading, schema, num_buckets)
        self._writing_reader = RowReader(self._writing, schema, num_buckets)
        self._stack: ExitStack | None = None
        self._logs: WriterLogs | None = None
        self._refusal: FencedError | RolledBackError | None = None
        self._rows_written = self._rows_deleted = 0
        self._sum_changes = RowSums(num_buckets)

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("the store is already open")
        with ExitStack() as stack:
            stack.enter_context(self._reading)
            stack.enter_context(self._writing)
            self._namespace.check_servers()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """See `Store.check`."""
        return self._namespace.check(reloads=reloads, resets=resets)

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`."""
        return self._namespace.claim(reloads=reloads)

    def reset(self, token: str) -> None:
        """See `Store.reset`."""
        with RedisLedger(self._namespace.as_recorded()) as ledger:
            ledger.acquire(token)
            ledger.clear()

    def ledger(self) -> Ledger:
        """See `Store.ledger`."""
        return RedisLedger(self._namespace, token=self._logs.fence.token if self._logs is not None else "")

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """See `Store.read`."""
        return self.read_many([(table, ids)])[0]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`."""
        self._check_open()
        return self._reader.read_many(requests)

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """See `Store.write`."""
        self.write_many([WriteRequest(table, ids, rows)])

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """See `Store.write_many`."""
        self._check_writable()
        hit("before-write-back")
        checked = [(request.table, *check_write(self.schema, request)) for request in requests]
        groups: list[WriteGroup] = []
        written: list[list[WriteRequest]] = []
        for members in by_width(self.schema, [request.table for request in requests]).values():
            part = [checked[member] for member in members]
            rows = part[0][2] if len(part) == 1 else np.concatenate([rows for _, _, rows in part])
            routed = self._writing.route([(table, ids) for table, ids, _ in part])
            voids, entries = as_voids(rows), None
            if self._logs is not None:
                entries = self._logs.entries(self._writing.num_commands(routed, voids.itemsize))
            checks = np.empty(len(voids), np.uint64)
            groups.append(WriteGroup(routed=routed, rows=voids, checks=checks, entries=entries))
            written.append([requests[member] for member in members])
        self._execute(groups)
        self._rows_written += sum(len(group.rows) for group in groups)
        for group, parts in zip(groups, written, strict=True):
            self._add_changes(group, parts)
        hit("after-write-back")

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        """See `Store.delete_many`."""
        self._check_writable()
        for batch in batches_of(check_deletion(self.schema, requests), _DELETED_ROWS):
            self._delete(batch)

    def fence(self, fence: Fence) -> None:
        """See `Store.fence`."""
        self._logs = WriterLogs(fence, self._keys)

    def rotate(self) -> NDArray[np.int64]:
        """See `Store.rotate`. ValueError without a fence."""
        self._check_writable()
        if self._logs is None:
            raise ValueError("a store without a fence has no logs to rotate")
        closed, opened = self._logs, self._logs.next()
        rotation = LogRotation(
            routed=self._writing.route_buckets(),
            rows=np.zeros(len(self._keys), "V1"),
            entries=closed.current(),
            next_keys=opened.log_keys,
            next_name=opened.log_name,
        )
        self._execute([rotation])
        self._logs = opened
        return closed.num_groups()

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        return next(self.ids_by_table([table]))[table]

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store.ids_by_table`."""
        for table in tables:
            check_read(self.schema, table, np.empty(0, np.int64))
        try:
            yield from self._namespace.ids_by_table(tables)
        except InputError as error:  # valid when the job began: no longer the user's input
            raise StoreError(str(error)) from error

    def num_rows(self) -> NDArray[np.int64]:
        """Rows of each table, int64 ``[num_tables]``. O(rows of the namespace) time, once.

        Raises:
            StoreError: a server failed.
        """
        try:
            return self._namespace.num_rows()
        except InputError as error:  # valid when it was opened
            raise StoreError(str(error)) from error

    def sum_changes(self) -> RowSums:
        """See `Store.sum_changes`."""
        return self._sum_changes.copy()

    def statistics(self) -> StoreStatistics:
        """See `Store.statistics`."""
        reading, writing = self._reading.traffic(), self._writing.traffic()
        return StoreStatistics(
            rows_read=self._reader.rows_read,
            rows_found=self._reader.rows_found,
            rows_written=self._rows_written,
            rows_deleted=self._rows_deleted,
            bytes_sent=reading.bytes_sent + writing.bytes_sent,
            bytes_received=reading.bytes_received + writing.bytes_received,
            moved=reading.moved + writing.moved,
            asked=reading.asked + writing.asked,
            failovers=reading.failovers + writing.failovers,
        )

    def _delete(self, batch: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Delete ids by table. Another thread may read over the reading client, so the rows are read over this one."""
        with self._keeping_refusals():
            stored = self._writing_reader.read_many(batch, repeat=self._logs is not None)
        routed, entries = self._writing.route(batch), None
        if self._logs is not None:
            entries = self._logs.entries(self._writing.num_commands(routed, FIELD_BYTES))
        self._execute([DeleteGroup.of(routed, entries)])
        for (table, ids), result in zip(batch, stored, strict=True):
            none = np.zeros_like(result.checks)
            self._sum_changes.replace_rows(np.array([table], np.uint32), ids, none, result.checks)
            self._rows_deleted += int(np.count_nonzero(result.found))

    def _execute(self, groups: Sequence[Change]) -> None:
        with self._keeping_refusals():
            self._writing.execute(groups, repeat=self._logs is not None)

    @contextmanager
    def _keeping_refusals(self) -> Iterator[None]:
        """Keep the error of a rejected writer for its later calls."""
        try:
            yield
        except FencedError as error:
            self._refusal = FencedError(str(error))
            raise
        except RolledBackError as error:
            self._refusal = RolledBackError(str(error))
            raise

    def _add_changes(self, group: WriteGroup, requests: Sequence[WriteRequest]) -> None:
        """Count an acknowledged group of these requests."""
        if all(request.replaced is None for request in requests):
            return
        # An unknown word is taken for that of the new row: the request changes nothing.
        replaced, start = group.checks.copy(), 0
        for request in requests:
            stop = start + len(request.ids)
            if request.replaced is not None:
                replaced[start:stop] = request.replaced
            start = stop
        self._sum_changes.replace_rows(group.routed.tables, group.routed.ids, group.checks, replaced)

    def _check_writable(self) -> None:
        self._check_open()
        if self._refusal is not None:  # a rejected writer stays rejected, with the same error
            raise type(self._refusal)(str(self._refusal))

    def _check_open(self) -> None:
        if self._stack is None:
            raise StoreError("the store is not open: use it in a with statement")
