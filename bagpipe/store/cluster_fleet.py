"""The rows' path through a Redis Cluster: bulk commands to each slot's master, and what its nodes answer is followed.

    groups ──table bucket -> master──> errands per node ──one exchange──> served
                ^                                          │ MOVED            a fresh topology, then sent again
                └─────────── those not served ─────────────┤ ASK              sent once, after ASKING, where it says
                                                           │ TRYAGAIN ...     the same, a little later
                                                           └ connection lost, or silent: to whoever has the slots next

Only commands that were not served are sent again, until the store's deadline. That is safe because rows are absolute
values, and because a connection given up with requests on their way is killed at its server before anything else is
sent there: what it still held could otherwise overwrite newer rows.
A node that comes back as another process stops the job: it may have lost its rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, StoreError
from bagpipe.store.cluster import Cluster
from bagpipe.store.exchange import Accept, Frame, Request, Talk, exchange
from bagpipe.store.fleet import Traffic
from bagpipe.store.keys import key_slot
from bagpipe.store.link import Bytes, Link, LinkLost
from bagpipe.store.routing import Command, RoutedRows, Router
from bagpipe.store.servers import Unreachable, refuse_unsafe
from bagpipe.store.topology import Address, Redirect, RedirectKind, Topology, parse_redirect
from bagpipe.store.transfer import Codec, Group, max_command_rows
from bagpipe.store.wire import ErrorReply, decode_ok

__all__ = ["ClusterFleet"]

G = TypeVar("G", bound=Group)

_NOT_OPEN = "the store is not open: use it in a with statement"
_ASKING = memoryview(b"*1\r\n$6\r\nASKING\r\n")
_EMPTY = memoryview(b"")
#: A node that has been silent for this share of the deadline, but a second at least, is looked for elsewhere. A dead
#: host says nothing, and the cluster takes some seconds (cluster-node-timeout, 15 by default) to replace it.
_PATIENCE = 0.25
_LEAST_PATIENCE_S = 1.0
#: Pauses before commands are sent again to a cluster in trouble: from the first to the second, doubling.
_PAUSES_S = (0.005, 0.25)
#: A connection that no server has: asking to kill it shows at the start whether we may.
_NO_CLIENT = (1 << 63) - 1


class _Errand(NamedTuple):
    """One command of one group, and whether it goes after ASKING."""

    group: int
    command: Command
    is_asking: bool


class _Unserved(NamedTuple):
    """An errand to send again, and what its node said; None: the node is gone, or has none."""

    errand: _Errand
    redirect: Redirect | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Visit:
    """Errands on their way to one node. Replies come in their order."""

    address: Address
    errands: list[_Errand]
    num_answered: int = 0
    redirects: list[_Unserved] = field(default_factory=list)

    def accept(self, decode: Accept, buffer: Bytes, start: int, end: int) -> int | None:
        """Decode the next errand's reply, or note where it is to go. See `bagpipe.store.exchange.Accept`."""
        try:
            after = decode(buffer, start, end)
        except ErrorReply as error:
            redirect = parse_redirect(error.line, self.address) if error.start == start else None
            if redirect is None:
                raise
            self.redirects.append(_Unserved(self.errands[self.num_answered], redirect))
            after = error.end
        if after is not None:
            self.num_answered += 1
        return after

    def unserved(self) -> list[_Unserved]:
        """What is to be sent again."""
        return [*self.redirects, *(_Unserved(errand, None) for errand in self.errands[self.num_answered :])]


class _Node(Generic[G]):
    """A link to one node, the node's process, and the codec of the link."""

    def __init__(self, link: Link, run_id: str, codec: Codec[G]) -> None:
        self.link = link
        self.run_id = run_id
        self.codec = codec


class ClusterFleet(Generic[G]):
    """The masters of a cluster. See `bagpipe.store.fleet.Fleet`.

    Args:
        cluster: where to ask who serves what.
        keys: key of each bucket.
        timeout_s: deadline of one `carry`, however often something is sent again.
        make_codec: one codec per link.
    """

    def __init__(
        self, cluster: Cluster, *, keys: Sequence[bytes], timeout_s: float, make_codec: Callable[[], Codec[G]]
    ) -> None:
        self._cluster = cluster
        self._slots = [key_slot(key) for key in keys]
        self._timeout_s = timeout_s
        self._patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * timeout_s)
        self._make_codec = make_codec
        self._topology: Topology
        self._routed: Topology  # the one that `_router` and `_addresses` were made of
        self._router: Router
        self._addresses: tuple[Address, ...] = ()
        self._nodes: dict[Address, _Node[G]] = {}
        self._run_ids: dict[Address, str] = {}
        # Process and number of connections given up with requests on their way.
        self._abandoned: dict[Address, list[tuple[str, int]]] = {}
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
        """See `Fleet.route`."""
        if self._closed.is_set():
            raise StoreError(self._why_closed)
        return self._router.route(requests)

    def carry(self, groups: Sequence[G]) -> None:
        """See `Fleet.carry`. After an error the fleet stays closed."""
        try:
            self._carry(groups)
        except BaseException as error:
            self._close(f"the connection was closed: {str(error) or type(error).__name__}")
            if isinstance(error, InputError):  # the nodes were fine when the job began
                raise StoreError(str(error)) from error
            raise

    def traffic(self) -> Traffic:
        """See `Fleet.traffic`."""
        links = [node.link for node in self._nodes.values()]
        return Traffic(
            bytes_sent=self._bytes_sent + sum(link.bytes_sent for link in links),
            bytes_received=self._bytes_received + sum(link.bytes_received for link in links),
            moved=self._moved,
            asked=self._asked,
            failovers=self._failovers,
        )

    def _carry(self, groups: Sequence[G]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        visits = self._first_visits(groups)
        waiting: list[_Unserved] = []
        lost: LinkLost | Unreachable | None = None
        pause_s = 0.0
        while True:
            trouble = self._exchange(visits, groups, deadline_s)
            unserved = [again for visit in visits for again in visit.unserved()] + waiting
            if not unserved:
                break
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

    def _first_visits(self, groups: Sequence[G]) -> list[_Visit]:
        visits = []
        for number, address in enumerate(self._addresses):
            errands = [
                _Errand(position, command, False)
                for position, group in enumerate(groups)
                for command in self._router.commands(
                    group.routed, number, max_rows=max_command_rows(group.rows.itemsize)
                )
            ]
            if errands:
                visits.append(_Visit(address=address, errands=errands))
        return visits

    def _next_visits(self, unserved: Sequence[_Unserved]) -> tuple[list[_Visit], list[_Unserved]]:
        """Visits for all that some node serves, and the rest."""
        visits: dict[Address, _Visit] = {}
        waiting = []
        for again in unserved:
            is_asking = again.redirect is not None and again.redirect.kind is RedirectKind.ASK
            slot = self._slots[again.errand.command.bucket]
            address = again.redirect.address if again.redirect and is_asking else self._topology.master_of(slot)
            if address is None:
                waiting.append(_Unserved(again.errand, None))
            else:
                visit = visits.setdefault(address, _Visit(address=address, errands=[]))
                visit.errands.append(again.errand._replace(is_asking=is_asking))
        return list(visits.values()), waiting

    def _exchange(
        self, visits: Sequence[_Visit], groups: Sequence[G], deadline_s: float
    ) -> LinkLost | Unreachable | None:
        """Visit all nodes at once. What connections did not survive; None if all went well.

        Raises:
            StoreError: a node answered something else, or not within the deadline, or lost its rows.
        """
        try:
            talks = []
            for visit in visits:
                node = self._node(visit.address, self._step_s(deadline_s))
                talks.append(Talk(node.link, self._frames(visit, node.codec, groups)))
            exchange(talks, self._timeout_s, deadline_s=deadline_s, patience_s=self._patience_s)
        except (LinkLost, Unreachable) as error:
            for visit in visits:
                self._drop(visit.address, str(error))
            return error
        for visit in visits:
            for again in visit.redirects:
                self._moved += again.redirect is not None and again.redirect.kind is RedirectKind.MOVED
                self._asked += again.redirect is not None and again.redirect.kind is RedirectKind.ASK
        return None

    def _frames(self, visit: _Visit, codec: Codec[G], groups: Sequence[G]) -> Iterator[Frame]:
        errands = iter(visit.errands)
        for position, part in groupby(visit.errands, key=lambda errand: errand.group):
            for frame in codec.frames(groups[position], (errand.command for errand in part)):
                requests = []
                for request in frame:
                    if next(errands).is_asking:
                        requests.append(Request(_ASKING, _EMPTY, 5, decode_ok))
                    requests.append(request._replace(accept=partial(visit.accept, request.accept)))
                yield requests

    def _pause(self, last_s: float, deadline_s: float, unserved: Sequence[_Unserved], lost: Exception | None) -> float:
        """Wait a little, longer than last time; seconds waited.

        Raises:
            StoreError: the deadline has passed; says what the nodes answered last.
        """
        pause_s = min(max(2 * last_s, _PAUSES_S[0]), _PAUSES_S[1])
        self._closed.wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
        if time.monotonic() < deadline_s:
            return pause_s
        first, *_ = unserved
        slot = self._slots[first.errand.command.bucket]
        answer = first.redirect.line if first.redirect else str(lost or "nobody serves it")
        raise StoreError(
            f"store {self._cluster.place}: slot {slot} was not served within store.timeout_s = "
            f"{self._timeout_s:g} s: {answer}"
        )

    def _refresh(self, deadline_s: float, unserved: Sequence[_Unserved], lost: LinkLost | Unreachable | None) -> None:
        """Ask who serves what. A redirection counts for more: whoever was asked may not have heard of it."""
        before = self._topology
        lost_places = set(lost.places) if isinstance(lost, LinkLost) else set()
        # Another node each time: one that is cut off from the others has an old view.
        self._num_refreshes += 1
        turn = self._num_refreshes % len(before.masters)
        first = [*before.masters[turn:], *before.masters[:turn], *before.replicas]
        first.sort(key=lambda address: self._cluster.server_at(address).place in lost_places)
        try:
            topology = self._cluster.topology(
                max(deadline_s - time.monotonic(), 0.0), first=first, patience_s=self._step_s(deadline_s)
            )
        except Unreachable:
            topology = before
        for errand, redirect in unserved:
            if redirect is not None and redirect.kind is RedirectKind.MOVED and redirect.address is not None:
                topology = topology.with_moved(self._slots[errand.command.bucket], redirect.address)
        self._topology = topology
        # Whoever is not a master for a while takes its rows from the one that is, and may come back as another process.
        self._run_ids = {address: self._run_ids[address] for address in topology.masters if address in self._run_ids}
        if lost is not None:
            self._note_failover(before, unserved)

    def _note_failover(self, before: Topology, unserved: Sequence[_Unserved]) -> None:
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
            link = server.connect(timeout_s, identify=True)
            try:
                with server.admin(timeout_s) as client:
                    info = client.info()
                    refuse_unsafe(server.place, info)
                    run_id = str(info.get("run_id"))
                    if self._run_ids.setdefault(address, run_id) != run_id:
                        raise StoreError(f"store {server.place} was started again, its rows may be lost")
                    for where, client_id in self._abandoned.get(address, [(run_id, _NO_CLIENT)]):
                        if where == run_id:
                            client.client_kill_filter(_id=client_id)
            except BaseException:
                link.close("the node was refused")
                raise
            self._abandoned[address] = []
            self._nodes[address] = _Node(link, run_id, self._make_codec())
        return self._nodes[address]

    def _drop(self, address: Address, why: str) -> None:
        """Give up the connection to a node; what is on its way there must not take effect later."""
        node = self._nodes.pop(address, None)
        if node is not None:
            self._abandoned[address].append((node.run_id, node.link.client_id))
            node.link.close(why)
            self._bytes_sent += node.link.bytes_sent
            self._bytes_received += node.link.bytes_received

    def _close(self, why: str) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._why_closed = why
        for address in list(self._nodes):
            self._drop(address, why)
