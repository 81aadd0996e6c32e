"""`Cluster`: a Redis Cluster as one backend of a namespace. `ClusterSession`: commands on single keys.

    seeds ──CLUSTER SLOTS──> Topology ──server_at──> one `Server` per node   redis-py connects, authenticates, encrypts
    ClusterSession.run(key, call): the client of the key's node; follows MOVED and ASK, retries transient errors

Rows take another path: `bagpipe.store.redis.cluster_client`. Why redis-py's cluster classes are not used:
docs/decisions/0014-own-cluster-topology.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis
from redis.exceptions import AskError, MovedError

from bagpipe.errors import InputError
from bagpipe.store.keys import NUM_SLOTS, key_slot
from bagpipe.store.redis.cluster_routing import Address, Topology, parse_slots
from bagpipe.store.redis.passing import is_passing_error, line_of
from bagpipe.store.redis.servers import (
    PIPELINE_COMMANDS,
    KeyCommand,
    NotNow,
    Server,
    Unreachable,
    send_commands,
    until_served,
)
from bagpipe.store.redis.urls import server_at

__all__ = ["Cluster", "ClusterSession"]

T = TypeVar("T")

#: Pause after a transient error.
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A Redis Cluster, known by its seeds.

    Attributes:
        seeds: nodes named in `store.url`.
    """

    seeds: tuple[Server, ...]

    @property
    def endpoint(self) -> str:
        """For messages: the first seed."""
        return self.seeds[0].endpoint

    @property
    def database(self) -> int:
        """Always 0: a cluster has one database."""
        return 0

    def server_at(self, address: Address) -> Server:
        """The node at an address."""
        return server_at(self.seeds[0], address)

    def topology(self, timeout_s: float, *, first: Sequence[Address] = (), patience_s: float | None = None) -> Topology:
        """The topology according to the first node that answers.

        Args:
            timeout_s: limit for all nodes together.
            first: nodes to ask before the seeds.
            patience_s: limit per node.

        Raises:
            Unreachable: no node answers; `NotNow` if one refuses for the time being.
            InputError: a node refuses the user, or is not a cluster node.
        """
        deadline_s = time.monotonic() + timeout_s
        failure: Unreachable | None = None
        known = {server.endpoint: server for server in (*map(self.server_at, first), *self.seeds)}
        for server in known.values():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                return _ask_topology(server, min(left_s, patience_s or left_s))
            except Unreachable as error:
                if failure is None or isinstance(error, NotNow):  # that one can be waited for
                    failure = error
        raise failure or Unreachable(f"store {self.endpoint}: no time was left to ask for the cluster's nodes")

    def whole_topology(self, timeout_s: float) -> Topology:
        """`topology`, checked to cover every slot.

        Raises:
            InputError: as for `topology`, or a slot has no node.
        """
        topology = until_served(partial(self.topology, timeout_s), timeout_s)
        if topology.num_covered < NUM_SLOTS:
            raise InputError(f"store {self.endpoint}: the cluster serves {topology.num_covered} of {NUM_SLOTS} slots")
        return topology

    def infos(
        self, timeout_s: float, *, with_fsync: bool = False, replayed: Sequence[KeyCommand] = ()
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """(endpoint, INFO) of every master, see `Server.infos`."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        for address in self.whole_topology(timeout_s).masters:
            server = self.server_at(address)
            found.append((server.endpoint, server.info(timeout_s, with_fsync=with_fsync, replayed=replayed)))
        return found

    @contextmanager
    def session(self, timeout_s: float) -> Iterator[ClusterSession]:
        """A session for commands on single keys; errors become `InputError`."""
        with ExitStack() as stack:
            yield ClusterSession(self, timeout_s, stack)


class _AskingRedis(redis.Redis):  # type: ignore[misc]  # redis-py ships partial types
    """Sends ASKING before each command, which the node that imports the slot then serves."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        super().execute_command("ASKING")
        return super().execute_command(*args, **options)


class ClusterSession:
    """Runs commands on the nodes of their keys. Each call has `timeout_s`."""

    def __init__(self, cluster: Cluster, timeout_s: float, stack: ExitStack) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._stack = stack
        self._topology = cluster.whole_topology(timeout_s)
        self._clients: dict[tuple[Address, bool], redis.Redis] = {}

    def run(self, key: bytes, call: Callable[[redis.Redis], T]) -> T:
        """Return `call(client of the key's node)`; may call it more than once.

        Raises:
            InputError: a node fails or refuses the user, or the key is unreachable until the deadline.
        """
        slot, deadline_s = key_slot(key), time.monotonic() + self._timeout_s
        asked: Address | None = None
        trouble, refusal = "no node serves its slot", ""
        while time.monotonic() < deadline_s:
            address = asked or self._topology.master_of(slot)
            if address is not None:
                with self._cluster.server_at(address).refusals(self._timeout_s):
                    try:
                        return call(self._client(address, is_asking=asked is not None))
                    except MovedError as error:
                        moved = Address(error.host or address.host, error.port)
                        self._topology, asked, trouble = self._topology.with_moved(slot, moved), None, str(error)
                        continue
                    except AskError as error:
                        asked, trouble = Address(error.host or address.host, error.port), str(error)
                        continue
                    except redis.RedisError as error:
                        if not is_passing_error(error):
                            raise
                        asked, refusal = None, line_of(error)  # says more than where it was asked
            threading.Event().wait(_PAUSE_S)
            with suppress(NotNow):
                self._topology = self._cluster.topology(self._timeout_s, first=self._topology.masters)
        raise InputError(
            f"store {self._cluster.endpoint}: no answer about {key.decode()} within store.timeout_s = "
            f"{self._timeout_s:g} s ({refusal or trouble})"
        )

    def run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Replies in order, pipelined per node. A command may run more than once. Raises as `run` does."""
        shares: dict[Address | None, list[int]] = {}
        for number, command in enumerate(commands):
            shares.setdefault(self._topology.master_of(key_slot(command.key)), []).append(number)
        answers: list[Any] = [redis.RedisError("no node serves its slot")] * len(commands)
        for address, share in shares.items():
            if address is None:
                continue
            with self._cluster.server_at(address).refusals(self._timeout_s):
                for start in range(0, len(share), PIPELINE_COMMANDS):
                    part = share[start : start + PIPELINE_COMMANDS]
                    client = self._client(address, is_asking=False)
                    try:
                        found = send_commands(client, [commands[number] for number in part])
                    except redis.ConnectionError as error:
                        if not is_passing_error(error):
                            raise
                        found = [error] * len(part)
                    for number, answer in zip(part, found, strict=True):
                        answers[number] = answer
        for number, (command, answer) in enumerate(zip(commands, answers, strict=True)):
            if isinstance(answer, Exception):  # redirection, transient error or refusal: `run` tells
                answers[number] = self.run(command.key, partial(_execute, command=command))
        return answers

    def _client(self, address: Address, *, is_asking: bool) -> redis.Redis:
        if (address, is_asking) not in self._clients:
            server = self._cluster.server_at(address)
            client_class = _AskingRedis if is_asking else redis.Redis
            client = self._stack.enter_context(server.admin(self._timeout_s, client_class=client_class))
            self._clients[address, is_asking] = client
        return self._clients[address, is_asking]


def _execute(client: redis.Redis, *, command: KeyCommand) -> Any:
    answer = client.execute_command(*command.words)
    command.check(answer)
    return answer


def _ask_topology(server: Server, timeout_s: float) -> Topology:
    with server.admin(timeout_s) as client:
        try:
            reply = client.execute_command("CLUSTER", "SLOTS")
        except redis.ResponseError as error:
            if "cluster support disabled" not in str(error):
                raise
            raise InputError(
                f"store {server.endpoint} is a server on its own, expected a cluster node; use redis:// instead"
            ) from None
    topology = parse_slots(reply, Address(server.settings["host"], server.settings["port"]))
    if not topology.masters:
        # A node that was reset, or is just joining; another one can know more.
        raise Unreachable(f"store {server.endpoint} knows of no node that serves any slot")
    return topology
