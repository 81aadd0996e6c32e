"""A real Redis Cluster on 127.0.0.1 for tests: three masters, and replicas of the first.

free ports ──> a private server per node ──MEET, ADDSLOTSRANGE, REPLICATE──> wait until all nodes say "ok"
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bagpipe.errors import InputError
from bagpipe.store.keys import NUM_SLOTS
from bagpipe.store.server.embedded import EmbeddedServer

__all__ = ["ClusterNode", "ClusterNodes", "await_true", "start_cluster", "start_server"]

_PATIENCE_S = 60.0
_START_TRIES = 5
_NUM_MASTERS = 3
#: High enough that a busy machine fails no node.
_NODE_TIMEOUT_MS = 15_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A running node, its two ports, and a client on its unix socket."""

    server: EmbeddedServer
    port: int
    bus_port: int
    client: redis.Redis
    folder: Path
    options: Mapping[str, str]

    @property
    def endpoint(self) -> str:
        """The node's URL in messages."""
        return f"redis+cluster://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return str(self.cluster("MYID").decode())

    def cluster(self, *words: str | int) -> Any:
        """The raw reply of a CLUSTER subcommand."""
        # "CLUSTER X" as one word would make redis-py convert the reply, depending on its version.
        return self.client.execute_command("CLUSTER", *words)

    def info(self) -> dict[str, str]:
        """CLUSTER INFO."""
        lines = self.cluster("INFO").decode().split()
        return dict(line.split(":", 1) for line in lines)

    def num_calls(self, command: str) -> int:
        """Number of calls of a command, for example ``client|kill``."""
        statistics = self.client.info("commandstats")
        return int(statistics.get(f"cmdstat_{command}", {"calls": 0})["calls"])

    def num_errors(self, word: str) -> int:
        """Number of error replies that start with this word."""
        statistics = self.client.info("errorstats")
        return int(statistics.get(f"errorstat_{word}", {"count": 0})["count"])


class ClusterNodes:
    """The nodes: masters first."""

    def __init__(self, nodes: tuple[ClusterNode, ...]) -> None:
        self.nodes = nodes
        self.masters = nodes[:_NUM_MASTERS]

    @property
    def url(self) -> str:
        """`store.url` with two of the nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters[:2])

    def owner_of(self, slot: int) -> ClusterNode:
        """The master of a slot, according to the last node."""
        for first, last, (_, port, *_), *_ in self.nodes[-1].cluster("SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"no node serves slot {slot}")

    def begin_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Start moving a slot: the source replies ASK for keys that it does not have."""
        target.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", target.id)

    def move_keys(self, slot: int, source: ClusterNode, target: ClusterNode) -> int:
        """Move all keys of a slot. Returns their number."""
        keys = source.cluster("GETKEYSINSLOT", slot, 1000)
        for key in keys:
            source.client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 10_000)
        return len(keys)

    def end_move(self, slot: int, target: ClusterNode) -> None:
        """Finish moving a slot: the old master replies MOVED."""
        for node in (target, *(node for node in self.masters if node is not target)):
            node.cluster("SETSLOT", slot, "NODE", target.id)

    def move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Move a slot and its keys in one step."""
        self.begin_move(slot, source, target)
        self.move_keys(slot, source, target)
        self.end_move(slot, target)


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition of another process.

    Raises:
        TimeoutError: it does not happen.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited in vain for {what}")
        select.select([], [], [], 0.02)


@contextmanager
def start_cluster(
    folder: Path,
    *,
    num_replicas: int = 0,
    node_timeout_ms: int = _NODE_TIMEOUT_MS,
    port_option: str = "port",
    options: Mapping[str, str] | None = None,
) -> Iterator[ClusterNodes]:
    """A cluster of three masters, and replicas of the first."""
    options = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": str(node_timeout_ms),
        "repl-diskless-sync-delay": "0",
        **(options or {}),
    }
    with ExitStack() as stack:
        nodes = tuple(
            stack.enter_context(_start_node(folder / f"node-{number}", port_option, options))
            for number in range(_NUM_MASTERS + num_replicas)
        )
        masters, replicas = nodes[:_NUM_MASTERS], nodes[_NUM_MASTERS:]
        bounds = [NUM_SLOTS * number // _NUM_MASTERS for number in range(_NUM_MASTERS + 1)]
        for number, node in enumerate(masters):
            node.cluster("ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            node.cluster("SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            node.cluster("MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
        await_true(lambda: all(node.info()["cluster_known_nodes"] == str(len(nodes)) for node in nodes), "a meeting")
        for node in replicas:
            node.cluster("REPLICATE", masters[0].id)
        await_true(lambda: all(node.info()["cluster_state"] == "ok" for node in nodes), "the cluster to be up")
        await_true(
            lambda: all(node.client.info("replication").get("master_link_status") == "up" for node in replicas),
            "the replicas to follow",
        )
        yield ClusterNodes(nodes)


@contextmanager
def _start_node(folder: Path, port_option: str, options: Mapping[str, str]) -> Iterator[ClusterNode]:
    with ExitStack() as stack:
        server, (port, bus_port), options = start_server(stack, folder, (port_option, "cluster-port"), options)
        client = redis.Redis.from_url(server.url, socket_timeout=_PATIENCE_S)
        stack.callback(client.close)
        yield ClusterNode(server=server, port=port, bus_port=bus_port, client=client, folder=folder, options=options)


def start_server(
    stack: ExitStack, folder: Path, port_options: tuple[str, ...], options: Mapping[str, str]
) -> tuple[EmbeddedServer, tuple[int, ...], dict[str, str]]:
    """A private server that also listens on free ports of 127.0.0.1. Returns server, ports and options."""
    for left in reversed(range(_START_TRIES)):
        with ExitStack() as reserved:
            sockets = [reserved.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in port_options]
            ports = tuple(sock.getsockname()[1] for sock in sockets)
        settings = {"bind": "127.0.0.1", **dict(zip(port_options, map(str, ports), strict=True)), **options}
        try:
            return stack.enter_context(EmbeddedServer(folder, options=settings)), ports, settings
        except InputError:  # another process took a port meanwhile
            if not left:
                raise
    raise AssertionError("not reached")
