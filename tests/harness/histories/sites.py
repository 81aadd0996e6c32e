"""`Site`: the servers of a history, the URL at which clients reach them, and what can be done to them.

ServerSite    clients ──> a FaultyProxy for each ──> one or two servers, killed and started again
ClusterSite   clients ──> three masters, and a replica of the first
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from bagpipe.store.interface import Store
from bagpipe.store.keys import bucket_key, bucket_of, key_slot
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from tests.harness.clock import find_compiler
from tests.harness.held_sync import HeldSync
from tests.harness.histories.rows import NUM_ROWS, SCHEMA
from tests.harness.proxy import ConnectionFault, FaultyProxy
from tests.store.nodes import ClusterNode, ClusterNodes, await_true, start_cluster

__all__ = ["BUCKETS", "ClusterSite", "ServerSite", "Site", "open_site"]

NAMESPACE = "history"
NUM_BUCKETS = 4
#: A silent connection counts as lost after a quarter of it.
_TIMEOUT_S = 6.0
#: The time in which a cluster replaces a master, several times.
_CLUSTER_TIMEOUT_S = 30.0
#: Of a cluster while a master is to be replaced; otherwise that of `start_cluster`, so that no other is.
_SHORT_NODE_TIMEOUT_MS = 1_000

#: Kinds of two servers, and their durability. Those of one server are named after it.
_PAIRS = {"pair": "always", "memory-pair": "memory"}

#: Bucket of each row.
BUCKETS: dict[int, int] = dict(
    enumerate(bucket_of(np.zeros(NUM_ROWS, np.uint32), np.arange(NUM_ROWS, dtype=np.int64), NUM_BUCKETS).tolist())
)


class Site(Protocol):
    """Servers of one history. Context manager, for one thread that outlives it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `open_store` for clients, without the schema."""
        ...

    @property
    def num_commands(self) -> int:
        """A measure of what the servers have been asked, to tell how far an operation is."""
        ...


class ServerSite:
    """Servers on their own, which share the buckets.

    Args:
        folder: for files and sockets.
        durability: of the servers.
        num_servers: one or two.

    Attributes:
        durability: of the servers.
        disk: of servers with `everysec`, if there is a C compiler.
        proxies: one for each server, while the site is open.
    """

    def __init__(self, folder: Path, *, durability: str, num_servers: int = 1) -> None:
        self.durability = durability
        self.disk: HeldSync | None = None
        self._folder = folder
        self._stack = ExitStack()
        self._folders = [folder / f"server-{number}" for number in range(num_servers)]
        self._servers: list[EmbeddedServer] = []
        self.proxies: list[FaultyProxy] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.durability == "everysec" and find_compiler() is not None:
                self.disk = HeldSync(self._folder)
            for number, folder in enumerate(self._folders):
                self._servers.append(self._start(number))
                stack.callback(self._stop, number)
                proxy = FaultyProxy(self._servers[number].url, listen=folder.with_suffix(".proxy"))
                self.proxies.append(stack.enter_context(proxy))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    @property
    def options(self) -> dict[str, Any]:
        """See `Site.options`."""
        return {
            "url": ",".join(proxy.url for proxy in self.proxies),
            "namespace": NAMESPACE,
            "buckets": NUM_BUCKETS,
            "timeout_s": _TIMEOUT_S,
            "durability": self.durability,
        }

    @property
    def num_commands(self) -> int:
        """See `Site.num_commands`."""
        return sum(proxy.num_answers for proxy in self.proxies)

    @property
    def num_servers(self) -> int:
        """One or two."""
        return len(self._folders)

    def rows_of(self, number: int) -> list[int]:
        """The rows on a server."""
        return [row for row, bucket in BUCKETS.items() if bucket % self.num_servers == number]

    def kill(self, number: int) -> None:
        """Kill a server."""
        os.kill(self._servers[number].process_id, signal.SIGKILL)
        if self.disk is not None:
            self.disk.release()  # the next process may sync when it starts

    def restart(self, number: int) -> None:
        """Start a server that was killed again, with what its files hold."""
        self._stop(number)
        self._servers[number] = self._start(number)

    def cut(self, number: int, fault: ConnectionFault) -> None:
        """Disturb the connections to a server."""
        self.proxies[number].inject(fault)

    def _start(self, number: int) -> EmbeddedServer:
        server = EmbeddedServer(self._folders[number], durability=self.durability)
        if self.disk is None:
            return server.__enter__()
        with self.disk.applied():
            return server.__enter__()

    def _stop(self, number: int) -> None:
        self._servers[number].__exit__(None, None, None)


class ClusterSite:
    """A cluster of three masters that keep rows in memory, and a replica of the first.

    Args:
        folder: for files and sockets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._nodes: ClusterNodes | None = None
        self._dead: list[ClusterNode] = []

    def __enter__(self) -> Self:
        self._nodes = self._stack.enter_context(start_cluster(self._folder, num_replicas=1))
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    @property
    def options(self) -> dict[str, Any]:
        """See `Site.options`."""
        masters = self.nodes.masters[1:]  # the first may be killed
        return {
            "url": "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in masters),
            "namespace": NAMESPACE,
            "buckets": NUM_BUCKETS,
            "timeout_s": _CLUSTER_TIMEOUT_S,
        }

    @property
    def num_commands(self) -> int:
        """See `Site.num_commands`."""
        return sum(int(node.client.info("stats")["total_commands_processed"]) for node in self.nodes.masters[:1])

    @property
    def nodes(self) -> ClusterNodes:
        """The nodes, while the site is open."""
        assert self._nodes is not None, "the site is not open"
        return self._nodes

    @property
    def first(self) -> ClusterNode:
        """The master that has a replica."""
        return self.nodes.masters[0]

    @property
    def replica(self) -> ClusterNode:
        """The replica of the first master."""
        return self.nodes.nodes[-1]

    @property
    def alive(self) -> list[ClusterNode]:
        """Nodes that were not killed."""
        return [node for node in self.nodes.nodes if node not in self._dead]

    def rows_of_first(self) -> list[int]:
        """The rows on the first master."""
        slots = {bucket: key_slot(bucket_key(NAMESPACE, bucket)) for bucket in range(NUM_BUCKETS)}
        return [row for row, bucket in BUCKETS.items() if self.nodes.owner_of(slots[bucket]) is self.first]

    def slot_of(self, bucket: int) -> int:
        """The slot of a bucket."""
        return key_slot(bucket_key(NAMESPACE, bucket))

    def cut(self) -> None:
        """Close all connections of clients."""
        for node in self.alive:
            node.client.client_kill_filter(_type="normal", skipme=True)

    def make_replica_lag(self) -> None:
        """Cut the replica off its master, which goes on acknowledging writes."""
        # A replica that is refused PSYNC tries SYNC.
        self.first.client.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        self.first.client.client_kill_filter(_type="replica")
        replication = self.first.client.info
        await_true(lambda: replication("replication")["connected_slaves"] == 0, "the replica to lag")

    def kill_first(self) -> None:
        """Kill the first master, for good."""
        os.kill(self.first.server.process_id, signal.SIGKILL)
        self._dead.append(self.first)

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Let the nodes replace a master that is silent for a second."""
        name = "cluster-node-timeout"
        before = {node.port: node.client.config_get(name)[name] for node in self.alive}
        for node in self.alive:
            node.client.config_set(name, _SHORT_NODE_TIMEOUT_MS)
        yield
        for node in self.alive:
            node.client.config_set(name, before[node.port])

    def await_replacement(self) -> None:
        """Wait until the replica is the master and all nodes know it."""
        await_true(lambda: self.replica.client.info("replication")["role"] == "master", "the replica to take over")
        self.await_whole()

    def await_whole(self) -> None:
        """Wait until all nodes serve every slot and agree whose they are."""
        await_true(lambda: all(node.info()["cluster_state"] == "ok" for node in self.alive), "the cluster")
        await_true(lambda: len({self._masters(node) for node in self.alive}) == 1, "the nodes to agree")

    def _masters(self, node: ClusterNode) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((first, port) for first, _, (_, port, *_), *_ in node.cluster("SLOTS")))


@contextmanager
def open_site(server: str, folder: Path) -> Iterator[ServerSite | ClusterSite]:
    """The site of a kind of server."""
    site: ServerSite | ClusterSite
    if server == "cluster":
        site = ClusterSite(folder)
    elif server in _PAIRS:
        site = ServerSite(folder, durability=_PAIRS[server], num_servers=2)
    else:
        site = ServerSite(folder, durability=server)
    with site:
        yield site


def connect(options: dict[str, Any]) -> Store:
    """A store of these options, not entered yet."""
    return open_store(schema=SCHEMA, **options)
