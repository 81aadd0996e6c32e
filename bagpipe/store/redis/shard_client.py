"""`ShardClient`: executes one batch on all servers of a store. `ServerListClient` is the one for a list of servers.

    RedisStore ──route──> groups of rows ──execute──> one request pipeline per server, one exchange

A store has one client for reading and one for writing, so that two threads never share a socket. A Redis Cluster has
a client of its own: `bagpipe.store.redis.cluster_client`.

What may be repeated (reading, and writing with a fence) survives a connection that breaks or falls silent: it is made
anew and all is sent again, until the deadline. A server that came back as another process ends it: rows may be lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, RolledBackError, StoreError
from bagpipe.store.redis.link import Link, LinkLost
from bagpipe.store.redis.request_pipeline import Frame, RequestPipeline, exchange
from bagpipe.store.redis.routing import RoutedRows, Router, servers_of_buckets
from bagpipe.store.redis.row_codecs import Codec, Group, max_command_rows
from bagpipe.store.redis.servers import Server, Unreachable

__all__ = ["ServerListClient", "ShardClient", "Traffic", "patience_s"]

G = TypeVar("G", bound=Group)
G_contra = TypeVar("G_contra", bound=Group, contravariant=True)

#: A server that has been silent for this share of the deadline, but a second at least, is asked again on another
#: connection, or looked for elsewhere. A dead host says nothing, and a cluster takes some seconds to replace it
#: (cluster-node-timeout, 15 by default).
_PATIENCE = 0.25
_LEAST_PATIENCE_S = 1.0
#: Pauses before a connection is tried again: from the first to the second, doubling.
_PAUSES_S = (0.005, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Totals of a client since it was made.

    Attributes:
        bytes_sent, bytes_received: of the wire.
        moved, asked: commands that a cluster's node sent elsewhere, for good and once.
        failovers: times that another node took over from one whose connection was lost.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    moved: int = 0
    asked: int = 0
    failovers: int = 0


class ShardClient(Protocol[G_contra]):
    """Use as a context manager; one thread at a time."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """Where rows of one width go; executed before anything else is routed."""
        ...

    def route_buckets(self) -> RoutedRows:
        """One pseudo-row for each bucket; see `Router.route_buckets`."""
        ...

    def num_commands(self, routed: RoutedRows, row_bytes: int) -> NDArray[np.int64]:
        """How many commands each bucket gets, int64 ``[num_buckets]``."""
        ...

    def place(self, bucket: int) -> str:
        """The server of a bucket, for messages."""
        ...

    def execute(self, groups: Sequence[G_contra], *, repeat: bool) -> None:
        """Send the groups' commands to their servers and take the replies.

        Args:
            groups: routed by this client.
            repeat: sending a command twice does no harm, however late the first one arrives.

        Raises:
            StoreError: a server failed, answered something else, or not within the deadline.
        """
        ...

    def traffic(self) -> Traffic: ...


def patience_s(timeout_s: float) -> float:
    """How long a server may be silent before it counts as lost, within a deadline of so many seconds."""
    return max(_LEAST_PATIENCE_S, _PATIENCE * timeout_s)


class ServerListClient(Generic[G]):
    """Servers that share the buckets by number.

    Args:
        servers: in the order that is part of the namespace.
        num_buckets: buckets of the namespace.
        timeout_s: deadline of one exchange, and of every connection attempt.
        make_codec: one codec per link.
    """

    def __init__(
        self, servers: Sequence[Server], *, num_buckets: int, timeout_s: float, make_codec: Callable[[], Codec[G]]
    ) -> None:
        self._servers = tuple(servers)
        self._router = Router(servers_of_buckets(num_buckets, len(servers)))
        self._timeout_s = timeout_s
        self._patience_s = patience_s(timeout_s)
        self._codecs = tuple(make_codec() for _ in servers)
        self._links: tuple[Link, ...] = ()
        self._run_ids: tuple[str, ...] = ()
        self._bytes_sent = self._bytes_received = 0  # of links that are gone

    def __enter__(self) -> Self:
        # Asked before connecting: a process that takes its place afterwards has another one.
        self._run_ids = tuple(_run_id(server, self._timeout_s) for server in self._servers)
        self._links = self._connect(self._timeout_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        links, self._links = self._links, ()
        self._count(links)
        for link in links:
            link.close("the store was closed")

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """See `ShardClient.route`."""
        return self._router.route(requests)

    def route_buckets(self) -> RoutedRows:
        """See `ShardClient.route_buckets`."""
        return self._router.route_buckets()

    def num_commands(self, routed: RoutedRows, row_bytes: int) -> NDArray[np.int64]:
        """See `ShardClient.num_commands`."""
        return self._router.num_commands(routed, max_rows=max_command_rows(row_bytes))

    def place(self, bucket: int) -> str:
        """See `ShardClient.place`."""
        return self._servers[bucket % len(self._servers)].place

    def execute(self, groups: Sequence[G], *, repeat: bool) -> None:
        """See `ShardClient.execute`. After an error the client stays closed."""
        if not self._links:
            raise StoreError("the store is not open: use it in a with statement")
        deadline_s, pause_s = time.monotonic() + self._timeout_s, 0.0
        patience = self._patience_s if repeat else math.inf
        while True:
            pipelines = [RequestPipeline(link, self._frames(number, groups)) for number, link in enumerate(self._links)]
            try:
                exchange(pipelines, self._timeout_s, deadline_s=deadline_s, patience_s=patience)
            except LinkLost as lost:
                if not repeat:
                    raise
                pause_s = self._reconnect(lost, deadline_s, pause_s)
            else:
                return

    def traffic(self) -> Traffic:
        """See `ShardClient.traffic`."""
        return Traffic(
            bytes_sent=self._bytes_sent + sum(link.bytes_sent for link in self._links),
            bytes_received=self._bytes_received + sum(link.bytes_received for link in self._links),
        )

    def _frames(self, number: int, groups: Sequence[G]) -> Iterator[Frame]:
        for group in groups:
            max_rows = max_command_rows(group.rows.itemsize)
            yield from self._codecs[number].frames(
                group, self._router.commands(group.routed, number, max_rows=max_rows)
            )

    def _connect(self, timeout_s: float) -> tuple[Link, ...]:
        """A link to every server.

        Raises:
            InputError: a server does not answer, or refuses us; nothing stays open.
        """
        links: list[Link] = []
        try:
            for server in self._servers:
                links.append(server.connect(timeout_s))
        except BaseException:
            for link in links:
                link.close("the store could not be opened")
            raise
        return tuple(links)

    def _reconnect(self, lost: LinkLost, deadline_s: float, last_pause_s: float) -> float:
        """Make new links, to the same processes; seconds waited before it, longer than last time.

        Raises:
            RolledBackError: a server is another process than before.
            StoreError: it is gone, or refuses us, or is out of reach until the deadline.
        """
        pause_s = last_pause_s
        while True:
            threading.Event().wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
            pause_s = min(max(2 * pause_s, _PAUSES_S[0]), _PAUSES_S[1])
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StoreError(f"{lost}; out of reach until store.timeout_s = {self._timeout_s:g} s") from lost
            try:
                self._replace_links(max(min(left_s, self._patience_s), 1e-3))
            except Unreachable as error:
                if _nobody_listens(error):  # whoever comes back is another process
                    raise StoreError(f"{lost}; {error}") from error
            except InputError as error:  # the server was fine when the job began
                raise StoreError(str(error)) from error
            else:
                return pause_s

    def _replace_links(self, timeout_s: float) -> None:
        links = self._connect(timeout_s)
        try:
            for server, run_id in zip(self._servers, self._run_ids, strict=True):
                if _run_id(server, timeout_s) != run_id:
                    raise RolledBackError(f"store {server.place} was started again, its rows may be lost")
        except BaseException as error:
            for link in links:
                link.close(str(error) or type(error).__name__)
            raise
        old, self._links = self._links, links
        self._count(old)

    def _count(self, links: Sequence[Link]) -> None:
        self._bytes_sent += sum(link.bytes_sent for link in links)
        self._bytes_received += sum(link.bytes_received for link in links)


def _run_id(server: Server, timeout_s: float) -> str:
    """What tells one process of a server from the next."""
    with server.admin(timeout_s) as client:
        return str(client.info("server").get("run_id"))


def _nobody_listens(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ConnectionRefusedError | FileNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None
