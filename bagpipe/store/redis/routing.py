"""`Router`: rows to commands, per bucket and server. No I/O.

ids of several tables ──bucket_of──> bucket ──one table──> server
                      ──one stable sort──> rows in sending order: server by server, bucket by bucket
each run of equal buckets ──> one command, or several if its reply would be too large
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import lt, sub
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.keys import bucket_of

__all__ = ["BucketCommand", "RoutedRows", "Router", "servers_of_buckets"]


class BucketCommand(NamedTuple):
    """One HMGET or HSET: rows ``[start, stop)`` of the sending order, all in `bucket`; the `part`-th of its bucket.

    A tuple, which takes a third of a frozen dataclass's time to create; a batch creates one per bucket.
    """

    bucket: int
    start: int
    stop: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedRows:
    """Rows of one width in sending order.

    Attributes:
        tables: uint32 ``[n]``, table number of each row, in request order.
        ids: int64 ``[n]``, id of each row, in request order.
        order: intp ``[n]``; row ``order[k]`` of the request is sent k-th. Equal ids keep their order.
        stops: per bucket in sending order: number of rows up to and including the bucket.
    """

    tables: NDArray[np.uint32]
    ids: NDArray[np.int64]
    order: NDArray[np.intp]
    stops: list[int]


def servers_of_buckets(num_buckets: int, num_servers: int) -> NDArray[np.intp]:
    """Server of each bucket in a list of servers: bucket modulo `num_servers`. Part of the stored format."""
    return np.arange(num_buckets, dtype=np.intp) % num_servers


class Router:
    """Routes rows over the buckets and servers of one namespace.

    Args:
        servers: integers ``[num_buckets]``: the server of each bucket.
    """

    def __init__(self, servers: NDArray[np.intp]) -> None:
        self.num_buckets = len(servers)
        # Buckets in sending order: all of server 0, then all of server 1, ...
        order = servers.argsort(kind="stable")
        self._buckets: list[int] = order.tolist()
        self._order = order
        self._positions = order.argsort().astype(np.uint16)
        self._in_order = bool((servers[1:] >= servers[:-1]).all())
        self._firsts: list[int] = np.searchsorted(servers[order], np.arange(int(servers.max()) + 2)).tolist()

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """Sort the rows of all requests by server and bucket."""
        lengths = [len(ids) for _, ids in requests]
        tables = np.repeat(np.array([table for table, _ in requests], np.uint32), lengths)
        ids = np.concatenate([ids for _, ids in requests]) if requests else np.empty(0, np.int64)
        positions = bucket_of(tables, ids, self.num_buckets)
        if not self._in_order:
            positions = self._positions[positions]
        stops: list[int] = np.bincount(positions, minlength=self.num_buckets).cumsum().tolist()
        return RoutedRows(tables=tables, ids=ids, order=positions.argsort(kind="stable"), stops=stops)

    def route_buckets(self) -> RoutedRows:
        """One placeholder row per bucket, for commands on buckets; its table and id are meaningless."""
        none = np.zeros(self.num_buckets, np.int64)
        positions = np.arange(self.num_buckets)
        return RoutedRows(tables=none.astype(np.uint32), ids=none, order=positions, stops=(positions + 1).tolist())

    def commands(self, rows: RoutedRows, server: int, *, max_rows: int) -> list[BucketCommand]:
        """Commands for one server in sending order, of at most `max_rows` rows each. `rows`: routed by this router."""
        first, last = self._firsts[server], self._firsts[server + 1]
        stops = rows.stops[first:last]
        starts = [rows.stops[first - 1] if first else 0, *stops[:-1]]
        # Half the time of calling `BucketCommand`, which a batch does once per bucket.
        wholes = map(tuple.__new__, repeat(BucketCommand), zip(self._buckets[first:last], starts, stops, repeat(0)))
        if all(map(lt, starts, stops)) and max(map(sub, stops, starts), default=0) <= max_rows:
            return list(wholes)
        return [
            BucketCommand(bucket, begin, min(begin + max_rows, stop), part)
            for bucket, start, stop, _ in wholes
            for part, begin in enumerate(range(start, stop, max_rows))
        ]

    def num_commands(self, rows: RoutedRows, *, max_rows: int) -> NDArray[np.int64]:
        """Number of `commands` of each bucket, int64 ``[num_buckets]``."""
        num_commands = np.empty(self.num_buckets, np.int64)
        num_commands[self._order] = -(-np.diff(rows.stops, prepend=0) // max_rows)
        return num_commands
