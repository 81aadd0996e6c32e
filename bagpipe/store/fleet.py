"""All servers of a store in one direction: rows in groups go out, and are back when every server has answered.

    RedisStore ──route──> groups of rows ──carry──> one talk per server, one exchange      ListFleet: servers of a list
                                                                                            ClusterFleet: cluster_fleet

A store has a fleet for reading and one for writing, so that two threads never share a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.exchange import Frame, Talk, exchange
from bagpipe.store.link import Link
from bagpipe.store.routing import RoutedRows, Router, spread
from bagpipe.store.servers import Server
from bagpipe.store.transfer import Codec, Group, max_command_rows

__all__ = ["Fleet", "ListFleet", "Traffic"]

G = TypeVar("G", bound=Group)
G_contra = TypeVar("G_contra", bound=Group, contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Totals of a fleet since it was made.

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


class Fleet(Protocol[G_contra]):
    """Use as a context manager; one thread at a time."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """Where rows of one width go; carried before anything else is routed."""
        ...

    def carry(self, groups: Sequence[G_contra]) -> None:
        """Send the groups' commands to their servers and take the replies.

        Raises:
            StoreError: a server failed, answered something else, or not within the deadline.
        """
        ...

    def traffic(self) -> Traffic: ...


class ListFleet(Generic[G]):
    """Servers that share the buckets by number. Whatever goes wrong ends it.

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
        self._router = Router(spread(num_buckets, len(servers)))
        self._timeout_s = timeout_s
        self._codecs = tuple(make_codec() for _ in servers)
        self._links: tuple[Link, ...] = ()
        self._stack: ExitStack | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            links = []
            for server in self._servers:
                link = server.connect(self._timeout_s)
                stack.callback(link.close, "the store was closed")
                links.append(link)
            self._links = tuple(links)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """See `Fleet.route`."""
        return self._router.route(requests)

    def carry(self, groups: Sequence[G]) -> None:
        """See `Fleet.carry`."""
        if self._stack is None:
            raise StoreError("the store is not open: use it in a with statement")
        talks = [Talk(link, self._frames(number, groups)) for number, link in enumerate(self._links)]
        exchange(talks, self._timeout_s)

    def traffic(self) -> Traffic:
        """See `Fleet.traffic`."""
        return Traffic(
            bytes_sent=sum(link.bytes_sent for link in self._links),
            bytes_received=sum(link.bytes_received for link in self._links),
        )

    def _frames(self, number: int, groups: Sequence[G]) -> Iterator[Frame]:
        for group in groups:
            max_rows = max_command_rows(group.rows.itemsize)
            yield from self._codecs[number].frames(
                group, self._router.commands(group.routed, number, max_rows=max_rows)
            )
