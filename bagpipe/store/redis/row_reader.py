"""`RowReader`: reads rows of a namespace, and can do nothing else.

requests ─ group by row width ─ route ─> HMGET per bucket, all servers at once ─> rows in request order
                                          every row's check word is compared as it arrives
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CorruptRowError
from bagpipe.store.interface import ReadResult
from bagpipe.store.keys import bucket_of
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.cluster_client import bucket_client
from bagpipe.store.redis.read_codec import ReadCodec, ReadGroup, damaged_rows
from bagpipe.store.redis.servers import Server
from bagpipe.store.redis.shard_client import ShardClient
from bagpipe.store.row_checksum import as_voids
from bagpipe.store.validation import check_read, row_dtype
from bagpipe.types.schema import RowSchema

__all__ = ["RowReader", "by_width", "reading_client"]


def reading_client(
    backends: Cluster | Sequence[Server], keys: Sequence[bytes], timeout_s: float
) -> ShardClient[ReadGroup]:
    """A client whose only command is HMGET on the buckets.

    Args:
        backends: a cluster, or the servers in order.
        keys: of the buckets, by number.
        timeout_s: deadline of one batch, and of every connection attempt.
    """
    return bucket_client(backends, list(keys), timeout_s, ReadCodec)


class RowReader:
    """Reads row records. One thread at a time.

    Args:
        client: entered by the caller.
        schema: tables, row widths and dtype.
        num_buckets: bucket hashes of the namespace.

    Attributes:
        rows_read, rows_found: totals.
    """

    def __init__(self, client: ShardClient[ReadGroup], schema: RowSchema, num_buckets: int) -> None:
        self.rows_read = self.rows_found = 0
        self._client = client
        self._schema = schema
        self._num_buckets = num_buckets

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]], *, repeat: bool = True) -> list[ReadResult]:
        """See `Store.read_many`. `repeat`: a lost connection is made again and the rows are read anew."""
        checked = [(table, check_read(self._schema, table, ids)) for table, ids in requests]
        results = [ReadResult(np.empty(0), np.empty(0, np.bool_), np.empty(0, np.uint64))] * len(checked)
        groups = []
        for (width, dtype), members in by_width(self._schema, [table for table, _ in checked]).items():
            lengths = [len(checked[member][1]) for member in members]
            rows, found = np.empty((sum(lengths), width), dtype), np.ones(sum(lengths), np.bool_)
            routed = self._client.route([checked[member] for member in members])
            checks = np.empty(sum(lengths), np.uint64)
            groups.append(ReadGroup(routed=routed, rows=as_voids(rows), checks=checks, found=found))
            start = 0
            for member, length in zip(members, lengths, strict=True):
                stop = start + length
                results[member] = ReadResult(rows[start:stop], found[start:stop], checks[start:stop])
                start = stop
        self._client.execute(groups, repeat=repeat)
        for group in groups:
            num_rows, num_found = len(group.found), int(np.count_nonzero(group.found))
            if num_found < num_rows:
                group.rows[~group.found] = np.zeros((), group.rows.dtype)
                group.checks[~group.found] = 0
            self._check_rows(group)
            self.rows_read += num_rows
            self.rows_found += num_found
        return results

    def _check_rows(self, group: ReadGroup) -> None:
        """Raise CorruptRowError if a row does not match its check word."""
        wrong = damaged_rows(group)
        if not len(wrong):
            return
        routed, first = group.routed, int(wrong[0])
        table, row_id = routed.tables[first], routed.ids[first]
        bucket = int(bucket_of(routed.tables[first : first + 1], routed.ids[first : first + 1], self._num_buckets)[0])
        raise CorruptRowError(
            f"{self._client.endpoint(bucket)}: table {self._schema.tables[table].name!r} id {row_id} (bucket {bucket}) "
            f"came back damaged, with {len(wrong) - 1} others: its check word does not match"
        )


def by_width(schema: RowSchema, tables: Sequence[int]) -> dict[tuple[int, np.dtype[np.generic]], list[int]]:
    """Request numbers by row width and dtype of the words.

    Args:
        schema: of the rows.
        tables: the table number of each request.
    """
    members: dict[tuple[int, np.dtype[np.generic]], list[int]] = {}
    for number, table in enumerate(tables):
        members.setdefault((schema.row_width(table), row_dtype(schema, table)), []).append(number)
    return members
