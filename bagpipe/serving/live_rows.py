"""`LiveRows`: the rows of a namespace while, or after, a job trains it. It sends PING, INFO, HGETALL and HMGET only.

    schema record of every server ──compare──> schema, buckets ──RowReader──> records ──weights──> vectors

A record has its optimizer state and check word behind the weights. A server can return only whole fields of a hash, so
the state is transferred too, and dropped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, StoreError
from bagpipe.serving.row_words import widen
from bagpipe.store.keys import bucket_key, check_layout
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.namespace import Backend
from bagpipe.store.redis.row_reader import RowReader, reading_client
from bagpipe.store.redis.stored_record import stored_record
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls
from bagpipe.types.schema import RowSchema, base_optimizer

__all__ = ["LiveRows"]


class LiveRows:
    """Rows of a namespace, read with pipelined requests. One thread at a time.

    After a StoreError the next read connects anew, and compares the schema record again.

    Args:
        url: redis://, rediss:// or unix:// URLs separated by commas, or one redis+cluster:// or rediss+cluster:// URL.
        namespace: of the job.
        timeout_s: deadline of one read, and of every connection attempt.
        expected: schema that the namespace must have; None: any.

    Raises:
        InputError: a malformed URL; a server is unreachable or refuses the user; the namespace has no rows, or those
            of another model.
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
        self.schema, self._num_buckets = self._stored(expected)
        self.decay: Mapping[str, float | None] = {}
        for number, table in enumerate(self.schema.tables):
            if base_optimizer(self.schema.optimizer_of(number))[1]:
                raise InputError(
                    f"rows of table {table.name!r} decay while they rest, and the store does not know by how much: "
                    "expected an export, which has their present weights"
                )
        self._open()

    def read(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[tuple[NDArray[Any], NDArray[np.bool_]]]:
        """For each table number and ids: weights ``[n, dim]`` in the compute dtype, and which are found.

        Raises:
            StoreError: a server failed, missed the deadline, or holds a damaged row.
        """
        try:
            if self._stack is None:
                self._stored(self.schema)
                self._open()
            results = self._reader.read_many(requests)
        except (StoreError, InputError) as error:
            self.close()
            raise error if isinstance(error, StoreError) else StoreError(str(error)) from error
        return [
            (widen(result.rows[:, : self.schema.tables[table].dim], self.schema.dtype_of(table)), result.found)
            for (table, _), result in zip(requests, results, strict=True)
        ]

    def ping(self) -> None:
        """Check that every server answers and still has the schema.

        Raises:
            StoreError: one does not.
        """
        try:
            self._stored(self.schema)
        except InputError as error:
            raise StoreError(str(error)) from error

    def close(self) -> None:
        """Close the connections. A read opens them again."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _open(self) -> None:
        keys = [bucket_key(self._namespace, bucket) for bucket in range(self._num_buckets)]
        client = reading_client(self._cluster or self._servers, keys, self._timeout_s)
        with ExitStack() as stack:
            stack.enter_context(client)
            self._stack = stack.pop_all()
        self._reader = RowReader(client, self.schema, self._num_buckets)

    def _stored(self, expected: RowSchema | None) -> tuple[RowSchema, int]:
        """Schema and number of buckets of the namespace. InputError if it has none, or others."""
        backends: tuple[Backend, ...] = self._servers if self._cluster is None else (self._cluster,)
        record = stored_record(backends, self._namespace, timeout_s=self._timeout_s, expected=expected)
        return record.schema, record.num_buckets
