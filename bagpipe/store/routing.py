"""Which row goes into which command to which server. Pure: arrays in, arrays and command lists out.

ids of several tables ──bucket_of──> bucket ──> server (bucket mod number of servers)
                      ──one stable sort──> rows in sending order: server by server, bucket by bucket
each run of equal buckets ──> one command, or several if its reply would be too large
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.keys import bucket_of

__all__ = ["Command", "RoutedRows", "Router"]


class Command(NamedTuple):
    """One HMGET or HSET: rows ``[start, stop)`` of the sending order, all in `bucket`.

    A tuple because making one takes a third of the time of a frozen dataclass, and a batch makes one per bucket before
    the first byte is sent.
    """

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedRows:
    """Rows of one width, in sending order.

    Attributes:
        order: intp ``[n]``; row ``order[k]`` of the request is the k-th sent. Stable: equal ids keep their order.
        tables: uint32 ``[n]``, table number of each row sent.
        ids: int64 ``[n]``, id of each row sent.
        commands: per server, its commands in sending order.
    """

    order: NDArray[np.intp]
    tables: NDArray[np.uint32]
    ids: NDArray[np.int64]
    commands: tuple[tuple[Command, ...], ...]


class Router:
    """Routes rows over the buckets and servers of one namespace."""

    def __init__(self, *, num_buckets: int, num_servers: int) -> None:
        self.num_buckets = num_buckets
        self.num_servers = num_servers
        # Place of each bucket in sending order: all buckets of server 0, then of server 1, ...
        servers = np.arange(num_buckets) % num_servers
        bucket_at = np.argsort(servers, kind="stable")
        self._place = np.empty(num_buckets, np.uint16)
        self._place[bucket_at] = np.arange(num_buckets)
        self._bucket_at: list[int] = bucket_at.tolist()

    def server_of(self, bucket: int) -> int:
        """Number of the server that holds the bucket."""
        return bucket % self.num_servers

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]], *, max_rows: int) -> RoutedRows:
        """Sort the rows of all requests into commands of at most `max_rows` rows."""
        lengths = [len(ids) for _, ids in requests]
        tables = np.repeat(np.array([table for table, _ in requests], np.uint32), lengths)
        ids = np.concatenate([ids for _, ids in requests]) if requests else np.empty(0, np.int64)
        places = bucket_of(tables, ids, self.num_buckets)
        if self.num_servers > 1:
            places = self._place[places]
        order = np.argsort(places, kind="stable")
        stops = np.cumsum(np.bincount(places, minlength=self.num_buckets)).tolist()
        commands: list[list[Command]] = [[] for _ in range(self.num_servers)]
        start = 0
        for bucket, stop in zip(self._bucket_at, stops, strict=True):
            for begin in range(start, stop, max_rows):
                commands[bucket % self.num_servers].append(Command(bucket, begin, min(begin + max_rows, stop)))
            start = stop
        return RoutedRows(
            order=order, tables=tables[order], ids=ids[order], commands=tuple(tuple(part) for part in commands)
        )
