"""`ClusterClient`: executes batches on a Redis Cluster, one bulk command per bucket to the master of its slot.

    groups ──bucket -> master──> commands per node ──one exchange──> served
                ^                                       │ MOVED             refresh the topology, send again
                └────────── not served ─────────────────┤ ASK               send once after ASKING, to the node named
                                                        │ NOREPLICAS ...    send again after a pause (passing)
                                                        └ connection lost   refresh the topology, send again

Only unserved commands are sent again, until the store's deadline. That is always safe after a redirection. After a lost
connection it is safe for reads and for fenced writes, whose logs reject late duplicates; unfenced writes fail.
A node that comes back as another process stops the job, because it may have lost rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError, RolledBackError, StoreError
from bagpipe.store.keys import key_slot
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.cluster_routing import (
    Address,
    NodeCommands,
    PendingCommand,
    RedirectKind,
    Topology,
    in_order,
)
from bagpipe.store.redis.link import Bytes, Link, LinkLost
from bagpipe.store.redis.passing import is_passing
from bagpipe.store.redis.request_pipeline import Frame, Request, RequestPipeline, exchange
from bagpipe.store.redis.resp_rows import ErrorReply, decode_ok
from bagpipe.store.redis.routing import RoutedRows, Router
from bagpipe.store.redis.row_codecs import Codec, Group, max_command_rows
from bagpipe.store.redis.server_checks import check_eviction
from bagpipe.store.redis.servers import Server, Unreachable
from bagpipe.store.redis.shard_client import ServerListClient, ShardClient, Traffic, patience_s

__all__ = ["ClusterClient", "bucket_client"]

G = TypeVar("G", bound=Group)

_NOT_OPEN = "the store is not open: use it in a with statement"
_ASKING = memoryview(b"*1\r\n$6\r\nASKING\r\n")
#: Pauses before commands are sent again: from the first to the second, doubling.
_PAUSES_S = (0.005, 0.25)


class _Node(Generic[G]):
    """A connected node: its link and the link's codec."""

    def __init__(self, link: Link, codec: Codec[G]) -> None:
        self.link = link
        self.codec = codec


class ClusterClient(Generic[G]):
    """Client of a cluster's masters. See `bagpipe.store.redis.shard_client.ShardClient`.

    Args:
        cluster: source of the topology.
        keys: key of each bucket.
        timeout_s: deadline of one `execute`, retries included.
        make_codec: makes one codec per link; a codec encodes one request per command.
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
        self._routed: Topology  # the topology of `_router` and `_addresses`
        self._router: Router
        self._addresses: tuple[Address, ...] = ()
        self._nodes: dict[Address, _Node[G]] = {}
        self._run_ids: dict[Address, str] = {}
        self._closed = threading.Event()
        self._closed.set()
        self._why_closed = _NOT_OPEN
        self._bytes_sent = self._bytes_received = 0  # of closed links
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

    def endpoint(self, bucket: int) -> str:
        """See `ShardClient.endpoint`."""
        address = self._topology.master_of(self._slots[bucket])
        return self._cluster.endpoint if address is None else self._cluster.server_at(address).endpoint

    def execute(self, groups: Sequence[G], *, repeat: bool) -> None:
        """See `ShardClient.execute`. After an error the client stays closed."""
        try:
            self._execute(groups, repeat)
        except BaseException as error:
            self._close(f"the connection was closed: {str(error) or type(error).__name__}")
            if isinstance(error, InputError):  # valid when the job began: no longer the user's input
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
        nodes = self._first_commands(groups)
        waiting: list[PendingCommand] = []
        lost: LinkLost | Unreachable | None = None
        pause_s = 0.0
        while True:
            failure = self._exchange(nodes, groups, deadline_s)
            pending = in_order([command for node in nodes for command in node.unserved()] + waiting)
            if not pending:
                break
            if isinstance(failure, LinkLost) and not repeat:
                raise failure
            lost = failure or lost
            kinds = {command.redirect and command.redirect.kind for command in pending}
            # The first redirection is followed without a pause; everything else needs a moment.
            if pause_s or kinds - {RedirectKind.MOVED, RedirectKind.ASK}:
                pause_s = self._pause(pause_s, deadline_s, pending, lost)
            else:
                pause_s = _PAUSES_S[0]
            if kinds - {RedirectKind.ASK}:
                self._refresh(deadline_s, pending, failure)
            nodes, waiting = self._next_commands(pending)
        if self._topology is not self._routed:
            self._adopt(self._topology)

    def _first_commands(self, groups: Sequence[G]) -> list[NodeCommands]:
        nodes = []
        for number, address in enumerate(self._addresses):
            commands = [
                PendingCommand(position, command)
                for position, group in enumerate(groups)
                for command in self._router.commands(
                    group.routed, number, max_rows=max_command_rows(group.rows.itemsize)
                )
            ]
            if commands:
                nodes.append(NodeCommands(address=address, commands=commands))
        return nodes

    def _next_commands(self, pending: Sequence[PendingCommand]) -> tuple[list[NodeCommands], list[PendingCommand]]:
        """Commands for every node that serves some, and the commands that no node serves."""
        nodes: dict[Address, NodeCommands] = {}
        waiting = []
        for command in pending:
            slot = self._slots[command.command.bucket]
            redirect = command.redirect if command.is_asking else None
            address = redirect.address if redirect is not None else self._topology.master_of(slot)
            if address is None:
                waiting.append(command.unanswered())
            else:
                node = nodes.setdefault(address, NodeCommands(address=address, commands=[]))
                node.commands.append(command._replace(redirect=redirect, gap=None))
        return list(nodes.values()), waiting

    def _exchange(
        self, nodes: Sequence[NodeCommands], groups: Sequence[G], deadline_s: float
    ) -> LinkLost | Unreachable | None:
        """Send to all nodes and receive. Returns the connection failure, or None.

        Raises:
            StoreError: a node sent an unexpected reply, missed the deadline, or lost its rows.
        """
        try:
            pipelines = []
            for commands in nodes:
                node = self._node(commands.address, self._step_s(deadline_s))
                pipelines.append(RequestPipeline(node.link, self._frames(commands, node.codec, groups)))
            exchange(pipelines, self._timeout_s, deadline_s=deadline_s, patience_s=self._patience_s)
        except (LinkLost, Unreachable) as error:
            for commands in nodes:
                self._drop(commands.address, str(error))
            return error
        for commands in nodes:
            for command in commands.redirected:
                self._moved += command.redirect is not None and command.redirect.kind is RedirectKind.MOVED
                self._asked += command.is_asking
        return None

    def _frames(self, node: NodeCommands, codec: Codec[G], groups: Sequence[G]) -> Iterator[Frame]:
        commands = iter(node.commands)
        for run in _runs(node.commands):
            for frame in codec.frames(groups[run[0].group], [command.command for command in run]):
                requests = []
                for pieces, max_reply_bytes, accept in frame:
                    if next(commands).is_asking:
                        requests.append(Request((_ASKING,), 5, _accept_asking))
                    requests.append(Request(pieces, max_reply_bytes, partial(node.accept, accept)))
                yield requests

    def _pause(
        self, last_s: float, deadline_s: float, pending: Sequence[PendingCommand], lost: Exception | None
    ) -> float:
        """Wait longer than last time. Returns the seconds waited.

        Raises:
            StoreError: the deadline has passed; names the last answer.
        """
        pause_s = min(max(2 * last_s, _PAUSES_S[0]), _PAUSES_S[1])
        self._closed.wait(min(pause_s, max(deadline_s - time.monotonic(), 0.0)))
        if time.monotonic() < deadline_s:
            return pause_s
        first = next((command for command in pending if command.redirect), pending[0])
        slot = self._slots[first.command.bucket]
        answer = first.redirect.line if first.redirect else str(lost or "no node serves it")
        raise StoreError(
            f"store {self._cluster.endpoint}: slot {slot} was not served within store.timeout_s = "
            f"{self._timeout_s:g} s: {answer}"
        )

    def _refresh(
        self, deadline_s: float, pending: Sequence[PendingCommand], lost: LinkLost | Unreachable | None
    ) -> None:
        """Fetch the topology, then apply MOVED redirections: the node asked may not know of them yet."""
        before = self._topology
        lost_endpoints = set(lost.endpoints) if isinstance(lost, LinkLost) else set()
        # Another node each time: a partitioned node has a stale view.
        self._num_refreshes += 1
        turn = self._num_refreshes % len(before.masters)
        first = [*before.masters[turn:], *before.masters[:turn], *before.replicas]
        first.sort(key=lambda address: self._cluster.server_at(address).endpoint in lost_endpoints)
        try:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            topology = self._cluster.topology(left_s, first=first, patience_s=self._step_s(deadline_s))
        except Unreachable:
            topology = before
        for _, command, redirect, _ in pending:
            if redirect is not None and redirect.kind is RedirectKind.MOVED and redirect.address is not None:
                topology = topology.with_moved(self._slots[command.bucket], redirect.address)
        self._topology = topology
        # A node that serves none of our buckets resynchronises from their master and may restart as another process.
        # Checked by bucket, because a stale view can still list the node as a master.
        serving = {topology.master_of(slot) for slot in self._slots}
        self._run_ids = {address: run_id for address, run_id in self._run_ids.items() if address in serving}
        for address in self._nodes.keys() - serving:  # or it is lost when the node stops, as in a failover
            self._drop(address, "the node serves no bucket")
        if lost is not None:
            self._note_failover(before, pending)

    def _note_failover(self, before: Topology, pending: Sequence[PendingCommand]) -> None:
        """Warn about replaced masters: a failover can lose acknowledged rows."""
        slots = {self._slots[command.command.bucket] for command in pending if command.redirect is None}
        pairs = {(before.master_of(slot), self._topology.master_of(slot)) for slot in slots}
        for old, new in sorted((old, new) for old, new in pairs if old and new and old != new):
            self._failovers += 1
            logging.getLogger(__name__).warning(
                "store %s: %s took over from %s, whose last acknowledged rows may be lost",
                self._cluster.endpoint, new, old,
            )  # fmt: skip

    def _adopt(self, topology: Topology) -> None:
        """Use this topology for routing."""
        masters = [topology.master_of(slot) for slot in self._slots]
        # A slot without a master goes to any node; its error reply says how to go on.
        any_master = next(master for master in (*masters, *topology.masters) if master is not None)
        numbers: dict[Address, int] = {}
        servers = [numbers.setdefault(master or any_master, len(numbers)) for master in masters]
        self._topology = self._routed = topology
        self._addresses = tuple(numbers)
        self._router = Router(np.array(servers, np.intp))

    def _step_s(self, deadline_s: float) -> float:
        """Timeout of one short request to one node."""
        return max(min(self._patience_s, deadline_s - time.monotonic()), 1e-3)

    def _node(self, address: Address, timeout_s: float) -> _Node[G]:
        """The connected node at an address.

        Raises:
            Unreachable: no answer.
            InputError: the node refused the connection, or can evict rows.
            RolledBackError: the node was restarted.
        """
        if self._closed.is_set():
            raise StoreError(self._why_closed)
        if address not in self._nodes:
            server = self._cluster.server_at(address)
            link = server.connect(timeout_s)
            try:
                info = server.info(timeout_s)
                check_eviction(server.endpoint, info)
                run_id = str(info.get("run_id"))
                if self._run_ids.setdefault(address, run_id) != run_id:
                    raise RolledBackError(f"store {server.endpoint} was started again, its rows may be lost")
            except BaseException:
                link.close("the node was refused")
                raise
            self._nodes[address] = _Node(link, self._make_codec())
        return self._nodes[address]

    def _drop(self, address: Address, why: str) -> None:
        """Close the connection to a node."""
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


def _accept_asking(buffer: Bytes, start: int, end: int) -> int | None:
    """See `decode_ok`. A node that refuses ASKING for the time being refuses what follows it, too."""
    try:
        return decode_ok(buffer, start, end)
    except ErrorReply as error:
        if not is_passing(error.line):
            raise
        return error.end


def _runs(commands: Sequence[PendingCommand]) -> Iterator[Sequence[PendingCommand]]:
    """Consecutive commands of one group. One that follows ASKING is alone, because another reply precedes its own."""
    first = 0
    for number, command in enumerate(commands):
        if number > first and (command.group != commands[first].group or command.is_asking):
            yield commands[first:number]
            first = number
        if command.is_asking:
            yield commands[number : number + 1]
            first = number + 1
    if first < len(commands):
        yield commands[first:]


def bucket_client(
    backends: Cluster | Sequence[Server], keys: Sequence[bytes], timeout_s: float, codec: Callable[..., Codec[G]]
) -> ShardClient[G]:
    """A client of the buckets of a namespace.

    Args:
        backends: a cluster, or the servers in order.
        keys: of the buckets, by number.
        timeout_s: deadline of one batch, and of every connection attempt.
        codec: makes the codec of a link: ``codec(keys)``, with ``one_by_one=True`` for requests of one command each.
    """
    if isinstance(backends, Cluster):  # every bucket has its own slot
        one_by_one = partial(codec, keys, one_by_one=True)
        return ClusterClient(backends, keys=keys, timeout_s=timeout_s, make_codec=one_by_one)
    make_codec = partial(codec, keys)
    return ServerListClient(backends, num_buckets=len(keys), timeout_s=timeout_s, make_codec=make_codec)
