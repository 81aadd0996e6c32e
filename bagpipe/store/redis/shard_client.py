"""`ShardClient`: executes one batch on all servers of a store. `ServerListClient` is the one for a list of servers.

    RedisStore ──route──> groups of rows ──execute──> one request pipeline per server, one exchange

A store has one client for reading and one for writing, so that two threads never share a socket. A Redis Cluster has
its own client: `bagpipe.store.redis.cluster_client`.

Reads and fenced writes survive a connection that breaks or goes silent: the client reconnects and sends everything
again, until the deadline. A restarted server ends the job, because rows may be lost.

A server that refuses requests for the time being (`bagpipe.store.redis.passing`) gets everything again after a pause,
until the deadline. All replies have arrived by then, so that is safe without a fence, too.
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

#: A server that is silent for this share of the deadline, at least one second, counts as lost: the client reconnects or
#: refreshes the topology. A dead host sends nothing, and a cluster takes seconds to replace it (cluster-node-timeout,
#: 15 s by default).
_PATIENCE = 0.25
_LEAST_PATIENCE_S = 1.0
#: Pauses between attempts to reconnect: from the first to the second, doubling.
_PAUSES_S = (0.005, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Totals of a client.

    Attributes:
        bytes_sent, bytes_received: bytes on the wire.
        moved, asked: MOVED and ASK redirections of a cluster.
        failovers: masters that were replaced after their connection was lost.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    moved: int = 0
    asked: int = 0
    failovers: int = 0


class ShardClient(Protocol[G_contra]):
    """Executes batches on all servers of a store. Context manager; not thread-safe."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """Route rows of one width. Execute them before routing others."""
        ...

    def route_buckets(self) -> RoutedRows:
        """One placeholder row per bucket; see `Router.route_buckets`."""
        ...

    def num_commands(self, routed: RoutedRows, row_bytes: int) -> NDArray[np.int64]:
        """Commands of each bucket, int64 ``[num_buckets]``."""
        ...

    def endpoint(self, bucket: int) -> str:
        """Address of a bucket's server, for messages."""
        ...

    def execute(self, groups: Sequence[G_contra], *, repeat: bool) -> None:
        """Send the groups' commands to their servers and receive the replies.

        Args:
            groups: routed by this client.
            repeat: commands are idempotent, even if the first copy arrives late.

        Raises:
            StoreError: a server failed, sent an unexpected reply, or missed the deadline.
        """
        ...

    def traffic(self) -> Traffic: ...


def patience_s(timeout_s: float) -> float:
    """Seconds of silence after which a server counts as lost, for a deadline of `timeout_s`."""
    return max(_LEAST_PATIENCE_S, _PATIENCE * timeout_s)


class ServerListClient(Generic[G]):
    """Client of a list of servers, which share the buckets by number.

    Args:
        servers: in order; the order is part of the namespace.
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
        self._bytes_sent = self._bytes_received = 0  # of closed links

    def __enter__(self) -> Self:
        # Read before connecting, so that a later restart is detected.
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

    def endpoint(self, bucket: int) -> str:
        """See `ShardClient.endpoint`."""
        return self._servers[bucket % len(self._servers)].endpoint

    def execute(self, groups: Sequence[G], *, repeat: bool) -> None:
        """See `ShardClient.execute`. After an error the client stays closed."""
        if not self._links:
            raise StoreError("the store is not open: use it in a with statement")
        deadline_s, pause_s = time.monotonic() + self._timeout_s, 0.0
        patience = self._patience_s if repeat else math.inf
        while True:
            refused: list[str] = []
            pipelines = [
                RequestPipeline(link, self._frames(number, groups), refused) for number, link in enumerate(self._links)
            ]
            try:
                exchange(pipelines, self._timeout_s, deadline_s=deadline_s, patience_s=patience)
            except LinkLost as lost:
                if not repeat:
                    raise
                pause_s = self._reconnect(lost, deadline_s, pause_s)
            else:
                if not refused:
                    return
                pause_s = self._pause(refused[0], deadline_s, pause_s)

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
            InputError: a server does not answer or refuses the connection; all links are closed.
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
        """Pause longer than last time, then reconnect to the same processes. Returns the pause.

        Raises:
            RolledBackError: a server was restarted.
            StoreError: a server is down, refuses the connection, or is unreachable until the deadline.
        """
        pause_s = last_pause_s
        while True:
            threading.Event().wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
            pause_s = min(max(2 * pause_s, _PAUSES_S[0]), _PAUSES_S[1])
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StoreError(f"{lost}; unreachable until store.timeout_s = {self._timeout_s:g} s") from lost
            try:
                self._replace_links(max(min(left_s, self._patience_s), 1e-3))
            except Unreachable as error:
                if _nobody_listens(error):  # a server that comes back is another process
                    raise StoreError(f"{lost}; {error}") from error
            except InputError as error:  # valid when the job began: no longer the user's input
                raise StoreError(str(error)) from error
            else:
                return pause_s

    def _pause(self, refusal: str, deadline_s: float, last_pause_s: float) -> float:
        """Pause longer than last time, after a server has refused requests. Returns the pause.

        Raises:
            StoreError: the deadline has passed. All links are closed.
        """
        pause_s = min(max(2 * last_pause_s, _PAUSES_S[0]), _PAUSES_S[1])
        threading.Event().wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
        if time.monotonic() < deadline_s:
            return pause_s
        error = StoreError(f"{refusal}; so it answered for store.timeout_s = {self._timeout_s:g} s")
        for link in self._links:
            link.close(str(error))
        raise error

    def _replace_links(self, timeout_s: float) -> None:
        links = self._connect(timeout_s)
        try:
            for server, run_id in zip(self._servers, self._run_ids, strict=True):
                if _run_id(server, timeout_s) != run_id:
                    raise RolledBackError(f"store {server.endpoint} was started again, its rows may be lost")
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
    """INFO's run_id, which changes with every restart."""
    return str(server.info(timeout_s, "server").get("run_id"))


def _nobody_listens(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ConnectionRefusedError | FileNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None
