"""The rows' path through a Redis Cluster: bulk commands to each slot's master, and what its nodes answer is followed.

    groups ──table bucket -> master──> errands per node ──one exchange──> served
                ^                                          │ MOVED            a fresh topology, then sent again
                └─────────── those not served ─────────────┤ ASK              sent once, after ASKING, where it says
                                                           │ TRYAGAIN ...     the same, a little later
                                                           └ connection lost, or silent: to whoever has the slots next

Only commands that were not served are sent again, until the store's deadline. After a redirection that is always safe;
after a lost connection only for what may be repeated: reading, and writing with a fence, whose late duplicates the logs
turn away. Writing without ends there.
A node that comes back as another process stops the job: it may have lost its rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, RolledBackError, StoreError
from bagpipe.store.keys import key_slot
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.link import Link, LinkLost
from bagpipe.store.redis.request_pipeline import Frame, Request, RequestPipeline, exchange
from bagpipe.store.redis.resp_rows import decode_ok
from bagpipe.store.redis.routing import RoutedRows, Router
from bagpipe.store.redis.row_codecs import Codec, Group, max_command_rows
from bagpipe.store.redis.server_checks import check_eviction
from bagpipe.store.redis.servers import Unreachable
from bagpipe.store.redis.shard_client import Traffic, patience_s
from bagpipe.store.redis.topology import Address, RedirectKind, Topology
from bagpipe.store.redis.visits import NodeCommands, PendingCommand, Unserved, in_order

__all__ = ["ClusterClient"]

G = TypeVar("G", bound=Group)

_NOT_OPEN = "the store is not open: use it in a with statement"
_ASKING = memoryview(b"*1\r\n$6\r\nASKING\r\n")
#: Pauses before commands are sent again to a cluster in trouble: from the first to the second, doubling.
_PAUSES_S = (0.005, 0.25)


class _Node(Generic[G]):
    """A link to one node, and the codec of the link."""

    def __init__(self, link: Link, codec: Codec[G]) -> None:
        self.link = link
        self.codec = codec


class ClusterClient(Generic[G]):
    """The masters of a cluster. See `bagpipe.store.redis.shard_client.ShardClient`.

    Args:
        cluster: where to ask who serves what.
        keys: key of each bucket.
        timeout_s: deadline of one `execute`, however often something is sent again.
        make_codec: one codec per link, which makes one request of each command.
    """

    def __init__(
        self, cluster: Cluster, *, keys: Sequence[bytes], timeout_s: float, make_codec: Callable[[], Codec[G]]
    ) -> None:
        self._cluster = cluster
        self._slots = [key_slot(key) for key in keys]
        self._timeout_s = timeout_s
        self._patience_s = patience_s(timeout_s)
        self._make_codec = make_codec
        self._topology: Topology
        self._routed: Topology  # the one that `_router` and `_addresses` were made of
        self._router: Router
        self._addresses: tuple[Address, ...] = ()
        self._nodes: dict[Address, _Node[G]] = {}
        self._run_ids: dict[Address, str] = {}
        self._closed = threading.Event()
        self._closed.set()
        self._why_closed = _NOT_OPEN
        self._bytes_sent = self._bytes_received = 0  # of links that are gone
        self._moved = self._asked = self._failovers = self._num_refreshes = 0

    def __enter__(self) -> Self:
        self._adopt(self._cluster.whole_topology(self._timeout_s))
        self._closed.clear()
        self._why_closed = _NOT_OPEN
        try:
            for address in self._addresses:
                self._node(address, self._timeout_s)
        except BaseException:
            self._close("the store could not be opened")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(_NOT_OPEN)

    def route(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> RoutedRows:
        """See `ShardClient.route`."""
        if self._closed.is_set():
            raise StoreError(self._why_closed)
        return self._router.route(requests)

    def route_buckets(self) -> RoutedRows:
        """See `ShardClient.route_buckets`."""
        if self._closed.is_set():
            raise StoreError(self._why_closed)
        return self._router.route_buckets()

    def num_commands(self, routed: RoutedRows, row_bytes: int) -> NDArray[np.int64]:
        """See `ShardClient.num_commands`."""
        return self._router.num_commands(routed, max_rows=max_command_rows(row_bytes))

    def place(self, bucket: int) -> str:
        """See `ShardClient.place`."""
        address = self._topology.master_of(self._slots[bucket])
        return self._cluster.place if address is None else self._cluster.server_at(address).place

    def execute(self, groups: Sequence[G], *, repeat: bool) -> None:
        """See `ShardClient.execute`. After an error the client stays closed."""
        try:
            self._execute(groups, repeat)
        except BaseException as error:
            self._close(f"the connection was closed: {str(error) or type(error).__name__}")
            if isinstance(error, InputError):  # the nodes were fine when the job began
                raise StoreError(str(error)) from error
            raise

    def traffic(self) -> Traffic:
        """See `ShardClient.traffic`."""
        links = [node.link for node in self._nodes.values()]
        return Traffic(
            bytes_sent=self._bytes_sent + sum(link.bytes_sent for link in links),
            bytes_received=self._bytes_received + sum(link.bytes_received for link in links),
            moved=self._moved,
            asked=self._asked,
            failovers=self._failovers,
        )

    def _execute(self, groups: Sequence[G], repeat: bool) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        visits = self._first_visits(groups)
        waiting: list[Unserved] = []
        lost: LinkLost | Unreachable | None = None
        pause_s = 0.0
        while True:
            trouble = self._exchange(visits, groups, deadline_s)
            unserved = in_order([again for visit in visits for again in visit.unserved()] + waiting)
            if not unserved:
                break
            if isinstance(trouble, LinkLost) and not repeat:
                raise trouble
            lost = trouble or lost
            kinds = {again.redirect and again.redirect.kind for again in unserved}
            # A redirection says where to go, the first time; whatever else is wrong needs a moment.
            if pause_s or kinds - {RedirectKind.MOVED, RedirectKind.ASK}:
                pause_s = self._pause(pause_s, deadline_s, unserved, lost)
            else:
                pause_s = _PAUSES_S[0]
            if kinds - {RedirectKind.ASK}:
                self._refresh(deadline_s, unserved, trouble)
            visits, waiting = self._next_visits(unserved)
        if self._topology is not self._routed:
            self._adopt(self._topology)

    def _first_visits(self, groups: Sequence[G]) -> list[NodeCommands]:
        visits = []
        for number, address in enumerate(self._addresses):
            errands = [
                PendingCommand(position, command, False)
                for position, group in enumerate(groups)
                for command in self._router.commands(
                    group.routed, number, max_rows=max_command_rows(group.rows.itemsize)
                )
            ]
            if errands:
                visits.append(NodeCommands(address=address, errands=errands))
        return visits

    def _next_visits(self, unserved: Sequence[Unserved]) -> tuple[list[NodeCommands], list[Unserved]]:
        """Visits for all that some node serves, and the rest."""
        visits: dict[Address, NodeCommands] = {}
        waiting = []
        for again in unserved:
            is_asking = again.redirect is not None and again.redirect.kind is RedirectKind.ASK
            slot = self._slots[again.errand.command.bucket]
            address = again.redirect.address if again.redirect and is_asking else self._topology.master_of(slot)
            if address is None:
                waiting.append(Unserved(again.errand, None))
            else:
                visit = visits.setdefault(address, NodeCommands(address=address, errands=[]))
                visit.errands.append(again.errand._replace(is_asking=is_asking))
        return list(visits.values()), waiting

    def _exchange(
        self, visits: Sequence[NodeCommands], groups: Sequence[G], deadline_s: float
    ) -> LinkLost | Unreachable | None:
        """NodeCommands all nodes at once. What connections did not survive; None if all went well.

        Raises:
            StoreError: a node answered something else, or not within the deadline, or lost its rows.
        """
        try:
            pipelines = []
            for visit in visits:
                node = self._node(visit.address, self._step_s(deadline_s))
                pipelines.append(RequestPipeline(node.link, self._frames(visit, node.codec, groups)))
            exchange(pipelines, self._timeout_s, deadline_s=deadline_s, patience_s=self._patience_s)
        except (LinkLost, Unreachable) as error:
            for visit in visits:
                self._drop(visit.address, str(error))
            return error
        for visit in visits:
            for again in visit.redirects:
                self._moved += again.redirect is not None and again.redirect.kind is RedirectKind.MOVED
                self._asked += again.redirect is not None and again.redirect.kind is RedirectKind.ASK
        return None

    def _frames(self, visit: NodeCommands, codec: Codec[G], groups: Sequence[G]) -> Iterator[Frame]:
        errands = iter(visit.errands)
        for position, part in groupby(visit.errands, key=lambda errand: errand.group):
            for frame in codec.frames(groups[position], (errand.command for errand in part)):
                requests = []
                for request in frame:
                    if next(errands).is_asking:
                        requests.append(Request((_ASKING,), 5, decode_ok))
                    requests.append(request._replace(accept=partial(visit.accept, request.accept)))
                yield requests

    def _pause(self, last_s: float, deadline_s: float, unserved: Sequence[Unserved], lost: Exception | None) -> float:
        """Wait a little, longer than last time; seconds waited.

        Raises:
            StoreError: the deadline has passed; says what the nodes answered last.
        """
        pause_s = min(max(2 * last_s, _PAUSES_S[0]), _PAUSES_S[1])
        self._closed.wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
        if time.monotonic() < deadline_s:
            return pause_s
        first = next((again for again in unserved if again.redirect), unserved[0])
        slot = self._slots[first.errand.command.bucket]
        answer = first.redirect.line if first.redirect else str(lost or "nobody serves it")
        raise StoreError(
            f"store {self._cluster.place}: slot {slot} was not served within store.timeout_s = "
            f"{self._timeout_s:g} s: {answer}"
        )

    def _refresh(self, deadline_s: float, unserved: Sequence[Unserved], lost: LinkLost | Unreachable | None) -> None:
        """Ask who serves what. A redirection counts for more: whoever was asked may not have heard of it."""
        before = self._topology
        lost_places = set(lost.places) if isinstance(lost, LinkLost) else set()
        # Another node each time: one that is cut off from the others has an old view.
        self._num_refreshes += 1
        turn = self._num_refreshes % len(before.masters)
        first = [*before.masters[turn:], *before.masters[:turn], *before.replicas]
        first.sort(key=lambda address: self._cluster.server_at(address).place in lost_places)
        try:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            topology = self._cluster.topology(left_s, first=first, patience_s=self._step_s(deadline_s))
        except Unreachable:
            topology = before
        for errand, redirect, _ in unserved:
            if redirect is not None and redirect.kind is RedirectKind.MOVED and redirect.address is not None:
                topology = topology.with_moved(self._slots[errand.command.bucket], redirect.address)
        self._topology = topology
        # Whoever serves none of our buckets for a while takes its rows from the one that does, and may come back as
        # another process. By bucket: the view of whoever was asked may still list it as a master.
        serving = {topology.master_of(slot) for slot in self._slots}
        self._run_ids = {address: run_id for address, run_id in self._run_ids.items() if address in serving}
        if lost is not None:
            self._note_failover(before, unserved)

    def _note_failover(self, before: Topology, unserved: Sequence[Unserved]) -> None:
        """Say which masters were replaced. It is the one way to lose rows that were acknowledged."""
        slots = {self._slots[again.errand.command.bucket] for again in unserved if again.redirect is None}
        pairs = {(before.master_of(slot), self._topology.master_of(slot)) for slot in slots}
        for old, new in sorted((old, new) for old, new in pairs if old and new and old != new):
            self._failovers += 1
            logging.getLogger(__name__).warning(
                "store %s: %s took over from %s; rows it wrote in its last moments may be lost",
                self._cluster.place, new, old,
            )  # fmt: skip

    def _adopt(self, topology: Topology) -> None:
        """Route by this topology from now on."""
        masters = [topology.master_of(slot) for slot in self._slots]
        # A slot that nobody serves goes to anyone: the answer says what to do.
        anyone = next(master for master in (*masters, *topology.masters) if master is not None)
        numbers: dict[Address, int] = {}
        servers = [numbers.setdefault(master or anyone, len(numbers)) for master in masters]
        self._topology = self._routed = topology
        self._addresses = tuple(numbers)
        self._router = Router(np.array(servers, np.intp))

    def _step_s(self, deadline_s: float) -> float:
        """Deadline of asking one node something short."""
        return max(min(self._patience_s, deadline_s - time.monotonic()), 1e-3)

    def _node(self, address: Address, timeout_s: float) -> _Node[G]:
        """The node at an address, connected.

        Raises:
            Unreachable: nobody answers there.
            InputError: it refuses us, or may drop rows.
            StoreError: it is another process than before.
        """
        if self._closed.is_set():
            raise StoreError(self._why_closed)
        if address not in self._nodes:
            server = self._cluster.server_at(address)
            link = server.connect(timeout_s)
            try:
                with server.admin(timeout_s) as client:
                    info = client.info()
                    check_eviction(server.place, info)
                    run_id = str(info.get("run_id"))
                    if self._run_ids.setdefault(address, run_id) != run_id:
                        raise RolledBackError(f"store {server.place} was started again, its rows may be lost")
            except BaseException:
                link.close("the node was refused")
                raise
            self._nodes[address] = _Node(link, self._make_codec())
        return self._nodes[address]

    def _drop(self, address: Address, why: str) -> None:
        """Give up the connection to a node."""
        node = self._nodes.pop(address, None)
        if node is not None:
            node.link.close(why)
            self._bytes_sent += node.link.bytes_sent
            self._bytes_received += node.link.bytes_received

    def _close(self, why: str) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._why_closed = why
        for address in list(self._nodes):
            self._drop(address, why)
