"""`LiveRows`: the rows of a namespace while, or after, a job trains it. It sends commands that change nothing.

    schema record of every server ──compare──> schema, buckets ──RowReader──> records ──weights──> vectors
    owners, logs, job record ──StoredNamespace──> StoreError if the rows are gone     rows not found ──> asked again

A record has its optimizer state and check word behind the weights. A server can return only whole fields of a hash, so
the state is transferred too, and dropped here.

A row that is not found was never trained, or the namespace has lost it, and only what lies beside the rows tells which.
So it is read when a connection is made, and again with reads that find no row of some id: at once if the buckets of
such a read are empty, else after `_CHECK_INTERVAL_S`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, StoreError
from bagpipe.serving.row_words import widen
from bagpipe.store.interface import ReadResult
from bagpipe.store.keys import bucket_key, bucket_of, check_layout
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.namespace import Backend
from bagpipe.store.redis.row_reader import RowReader, reading_client
from bagpipe.store.redis.server_checks import READING_COMMANDS
from bagpipe.store.redis.servers import Unreachable, is_denied
from bagpipe.store.redis.stored_record import StoredNamespace, stored_record
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls
from bagpipe.types.schema import RowSchema, base_optimizer

__all__ = ["LiveRows"]

#: Shortest time between two checks that the namespace is whole, while reads find some rows.
_CHECK_INTERVAL_S = 1.0


class LiveRows:
    """Rows of a namespace, read with pipelined requests. One thread at a time.

    After a StoreError the next read connects anew, and compares the schema record again.

    Args:
        url: redis://, rediss:// or unix:// URLs separated by commas, or one redis+cluster:// or rediss+cluster:// URL.
        namespace: of the job.
        timeout_s: deadline of one read, and of every connection attempt.
        expected: schema that the namespace must have; None: any.

    Raises:
        InputError: a malformed URL; a server is unreachable or refuses the user; the namespace is not that of a job, or
            of another model.
        StoreError: the namespace has lost its rows, or what lies beside them.
    """

    def __init__(self, url: str, *, namespace: str, timeout_s: float, expected: RowSchema | None = None) -> None:
        check_layout(namespace, 1)
        if not timeout_s > 0:
            raise InputError(f"timeout_s must be greater than 0, got {timeout_s}")
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._stack: ExitStack | None = None
        self._reader: RowReader
        self._cluster = Cluster(seeds=parse_cluster_url(url)) if is_cluster_url(url) else None
        self._servers = () if self._cluster is not None else parse_urls(url)
        self._stored: StoredNamespace
        self._checked_s = 0.0
        with self._naming_rights():
            self.schema, self._num_buckets = self._recorded(expected)
        self.decay: Mapping[str, float | None] = {}
        for number, table in enumerate(self.schema.tables):
            if base_optimizer(self.schema.optimizer_of(number))[1]:
                raise InputError(
                    f"rows of table {table.name!r} decay while they rest, and the store does not know by how much: "
                    "expected an export, which has their present weights"
                )
        with self._naming_rights():
            self._open()

    def read(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[tuple[NDArray[Any], NDArray[np.bool_]]]:
        """For each table number and ids: weights ``[n, dim]`` in the compute dtype, and which are found.

        Raises:
            StoreError: a server failed, missed the deadline or holds a damaged row, or the namespace has lost rows.
        """
        try:
            with self._naming_rights():
                if self._stack is None:
                    self._recorded(self.schema)
                    self._open()
                results = self._reader.read_many(requests)
                if not all(result.found.all() for result in results):
                    self._check_missing(requests, results)
        except (StoreError, InputError) as error:
            self.close()
            raise error if isinstance(error, StoreError) else StoreError(str(error)) from error
        return [
            (widen(result.rows[:, : self.schema.tables[table].dim], self.schema.dtype_of(table)), result.found)
            for (table, _), result in zip(requests, results, strict=True)
        ]

    def ping(self) -> None:
        """Check that every server answers and still has the schema, and that the namespace has what it had.

        Raises:
            StoreError: one does not.
        """
        try:
            with self._naming_rights():
                self._recorded(self.schema)
                with StoredNamespace.opened(
                    self._backends, self._namespace, self._num_buckets, self._timeout_s
                ) as stored:
                    stored.check()
        except InputError as error:
            raise StoreError(str(error)) from error

    def close(self) -> None:
        """Close the connections. A read opens them again."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    @property
    def _backends(self) -> tuple[Backend, ...]:
        return self._servers if self._cluster is None else (self._cluster,)

    def _open(self) -> None:
        keys = [bucket_key(self._namespace, bucket) for bucket in range(self._num_buckets)]
        client = reading_client(self._cluster or self._servers, keys, self._timeout_s)
        with ExitStack() as stack:
            stack.enter_context(client)
            self._stored = stack.enter_context(
                StoredNamespace.opened(self._backends, self._namespace, self._num_buckets, self._timeout_s)
            )
            self._check_whole()
            self._reader = RowReader(client, self.schema, self._num_buckets)
            self._reader.read_many([(0, np.zeros(1, np.int64))])  # a user without HMGET is refused now
            self._stack = stack.pop_all()

    @contextmanager
    def _naming_rights(self) -> Iterator[None]:
        """Name all that a reader needs when a server refuses one command: it would refuse the next one later."""
        try:
            yield
        except (InputError, StoreError) as error:
            if not is_denied(error):
                raise
            keys = f"~{self._namespace}:{{* ~{self._namespace}:meta"
            commands = [*READING_COMMANDS, *(("asking", "cluster|slots") if self._cluster else ())]
            raise InputError(
                f"{error}; a reader needs {keys} {' '.join(f'+{name}' for name in commands)} (see docs/serving.md)"
            ) from error

    def _check_missing(self, requests: Sequence[tuple[int, NDArray[np.int64]]], results: Sequence[ReadResult]) -> None:
        """Check that ids without a row were never trained. See the head of this file."""
        if any(result.found.any() for result in results):
            if time.monotonic() - self._checked_s >= _CHECK_INTERVAL_S:
                self._check_again()
            return
        buckets = [bucket_of(np.full(len(ids), table, np.uint32), ids, self._num_buckets) for table, ids in requests]
        touched = np.unique(np.concatenate(buckets)).tolist()
        try:
            is_empty = 0 in self._stored.num_rows(touched)
        except Unreachable:  # of a cluster's node, say, whose replica serves the rows now
            is_empty = True
        if is_empty:
            self._check_again()

    def _check_again(self) -> None:
        """Check over the open connections, else over new ones."""
        try:
            self._check_whole()
        except Unreachable:
            with StoredNamespace.opened(self._backends, self._namespace, self._num_buckets, self._timeout_s) as stored:
                stored.check()

    def _check_whole(self) -> None:
        self._stored.check()
        self._checked_s = time.monotonic()

    def _recorded(self, expected: RowSchema | None) -> tuple[RowSchema, int]:
        """Schema and number of buckets of the namespace. InputError if it has none, or others."""
        record = stored_record(self._backends, self._namespace, timeout_s=self._timeout_s, expected=expected)
        return record.schema, record.num_buckets
