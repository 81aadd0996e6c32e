"""Refusals that pass: real servers refuse every step of a job for a while, or until the deadline."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest
from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import NUM_SLOTS, bucket_key, key_slot, meta_key
from bagpipe.store.redis.passing import is_passing
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer, installed_servers
from bagpipe.testing.fence_jobs import new_name, new_token
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import ClusterNode, ClusterNodes, await_true

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=4), RowTable(name="item", dim=2)), optimizer="sgd")
NUM_BUCKETS = 8
IDS = np.arange(100, dtype=np.int64)
ROWS = np.arange(400, dtype=np.float32).reshape(100, 4)
#: Of servers that refuse until the deadline.
TIMEOUT_S = 0.3


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("-NOREPLICAS Not enough good replicas to write. script: 5ce…, on @user_script:4.", True),
        ("EXECABORT Transaction discarded because of: NOREPLICAS Not enough good replicas to write.", True),
        ("ERR Error running script (call to f_5ce): @user_script:4: @user_script: 4: -READONLY You can't write", True),
        ("Command # 2 (HSET a\nb NOPERM) of pipeline caused error: LOADING Valkey is loading the dataset", True),
        ("ERR max number of clients reached", True),
        ("ERR max number of clients + cluster connections reached", True),
        ("BUSY Valkey is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.", True),
        ("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.", True),
        ("MISCONF Errors writing to the AOF file: No space left on device", False),
        ("OOM command not allowed when used memory > 'maxmemory'.", False),
        ("EXECABORT Transaction discarded because of previous errors.", False),
        ("EXECABORT Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'.", False),
        ("BUSYKEY Target key name already exists.", False),
        ("NOPERM User trainer has no permissions to run the 'hset' command", False),
        ("MOVED 3999 127.0.0.1:6381", False),
        ("ERR unknown command 'LOADING'", False),
        ("", False),
    ],
)
def test_lines_of_errors(line: str, passes: bool) -> None:
    assert is_passing(line) == passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A state of a server in which it refuses commands.

    Attributes:
        of: kinds of steps of which it refuses a command.
        begin: puts the server of a client into this state.
        end: waits until it has refused a command, and ends the state.
    """

    of: frozenset[str]
    begin: Callable[[redis.Redis], object]
    end: Callable[[redis.Redis], object]


ALL = frozenset({"connect", "read", "write"})
#: Runs until a second command was refused: the first is that of `is_busy`.
BUSY_SCRIPT = """
repeat
  for _ = 1, 10000 do end
  local refused = string.match(redis.call('INFO', 'errorstats'), 'errorstat_BUSY:count=(%d+)')
until refused and tonumber(refused) > 1
"""


def after(words: set[str], end: Callable[[redis.Redis], object]) -> Callable[[redis.Redis], None]:
    """Ends a state after an error reply that starts with one of these words."""
    names = {f"errorstat_{word}" for word in words}

    def run(client: redis.Redis) -> None:
        await_true(lambda: bool(names & set(client.info("errorstats"))), "a refusal")
        end(client)

    return run


def lose_master(client: redis.Redis, *, serves: str) -> None:
    client.config_set("replica-serve-stale-data", serves)
    client.replicaof("127.0.0.1", 1)  # where nobody listens


def lead(client: redis.Redis) -> None:
    client.replicaof("NO", "ONE")


def snapshot(client: redis.Redis, *, succeeds: bool) -> None:
    file = Path(client.config_get("dir")["dir"], "dump.rdb")
    if succeeds:
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
        file.mkdir()  # no file can take its place
    client.config_set("save", "3600 1000000")
    client.bgsave()
    await_true(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], "a snapshot")


def run_long_script(client: redis.Redis) -> None:
    client.config_set("busy-reply-threshold", 1)
    threading.Thread(target=client.eval, args=(BUSY_SCRIPT, 0), name="script").start()
    await_true(lambda: is_busy(client), "the script")


def is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


def join_script(client: redis.Redis) -> None:
    for thread in threading.enumerate():
        if thread.name == "script":
            thread.join()
    assert client.info("errorstats")["errorstat_BUSY"]["count"] > 1


def load_slowly(client: redis.Redis) -> None:
    client.mset({f"filler:{number}": os.urandom(4096) for number in range(200)})
    client.config_set("loading-process-events-interval-bytes", 1024)
    client.config_set("key-load-delay", 30_000)  # in microseconds
    threading.Thread(target=client.execute_command, args=("DEBUG", "RELOAD"), name="script").start()
    await_true(lambda: bool(client.info("persistence")["loading"]), "the load")


def load_at_once(client: redis.Redis) -> None:
    client.config_set("key-load-delay", 0)
    for thread in threading.enumerate():
        if thread.name == "script":
            thread.join()


def accept_clients(client: redis.Redis) -> None:
    await_true(lambda: bool(client.info("stats")["rejected_connections"]), "a refusal")
    client.config_set("maxclients", 1000)


NOREPLICAS = Refusal(
    of=frozenset({"write"}),
    begin=lambda client: client.config_set("min-replicas-to-write", 1),
    end=after({"NOREPLICAS"}, lambda client: client.config_set("min-replicas-to-write", 0)),
)
BUSY = Refusal(of=ALL, begin=run_long_script, end=join_script)
LOADING = Refusal(of=ALL, begin=load_slowly, end=after({"LOADING"}, load_at_once))
MISCONF = Refusal(
    of=frozenset({"connect", "write"}),  # PING, too
    begin=partial(snapshot, succeeds=False),
    end=after({"MISCONF"}, partial(snapshot, succeeds=True)),
)
READONLY = Refusal(of=frozenset({"write"}), begin=partial(lose_master, serves="yes"), end=after({"READONLY"}, lead))
TOO_MANY_CLIENTS = Refusal(
    of=frozenset({"connect"}),
    begin=lambda client: client.config_set("maxclients", 1),
    end=accept_clients,
)
MASTERDOWN = Refusal(of=ALL, begin=partial(lose_master, serves="no"), end=after({"MASTERDOWN", "READONLY"}, lead))


class Steps:
    """A job, step by step."""

    def __init__(self, url: str, namespace: str, stack: ExitStack, timeout_s: float = 60.0) -> None:
        self._store = RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=NUM_BUCKETS, timeout_s=timeout_s)
        self._stack = stack
        self._token = new_token(1)
        self._ledger: Ledger

    def by_name(self) -> dict[str, tuple[str, Callable[[], object]]]:
        """The steps by name, in order, each with the kind of its commands."""
        return {
            "open": ("connect", self._open),
            "check": ("read", self._store.check),
            "claim": ("write", self._claim),
            "write without a fence": ("write", lambda: self._store.write(0, IDS, -ROWS)),
            "delete without a fence": ("write", lambda: self._store.delete_many([DeleteRequest(0, IDS)])),
            "open the ledger": ("read", self._open_ledger),
            "acquire": ("write", lambda: self._ledger.acquire(self._token)),
            "begin": ("write", lambda: self._ledger.begin("m:0", 1)),
            "write": ("write", self._write),
            "read": ("read", self._read),
            "delete": ("write", lambda: self._store.delete_many([DeleteRequest(0, IDS[50:])])),
            "read what is left": ("read", self._read_left),
            "ids": ("read", self._ids),
            "num_rows": ("read", self._num_rows),
            "touched": ("read", self._touched),
            "rotate": ("write", self._rotate),
            "commit": ("write", lambda: self._ledger.commit("m:1", 1, [self._num_groups])),
            "state": ("read", self._state),
            "record_job": ("write", lambda: self._ledger.record_job(JobRecord(job="a", has_checkpoints=True))),
            "job": ("read", self._job),
            "reset": ("write", lambda: self._store.reset(new_token(2))),
        }

    def _open(self) -> None:
        self._stack.enter_context(self._store)

    def _claim(self) -> None:
        assert self._store.claim()

    def _open_ledger(self) -> None:
        assert not self._store.read(0, IDS).found.any()
        self._ledger = self._stack.enter_context(self._store.ledger())

    def _write(self) -> None:
        self._store.fence(Fence(token=self._token, writer=0, epoch=1))
        self._store.write(0, IDS, -ROWS)
        self._store.write(0, IDS, ROWS)

    def _read(self) -> None:
        assert (self._store.read(0, IDS).rows == ROWS).all()

    def _read_left(self) -> None:
        left = self._store.read(0, IDS)
        assert (left.rows[:50] == ROWS[:50]).all()
        assert left.found.tolist() == [True] * 50 + [False] * 50

    def _ids(self) -> None:
        assert (self._store.ids(0) == IDS[:50]).all()

    def _num_rows(self) -> None:
        assert self._store.num_rows().tolist() == [50, 0]

    def _touched(self) -> None:
        touched = [self._ledger.touched(bucket) for bucket in range(NUM_BUCKETS)]
        assert sorted(np.concatenate(touched)["id"].tolist()) == IDS.tolist()

    def _rotate(self) -> None:
        self._num_groups = self._store.rotate().tolist()
        assert self._num_groups == [3] * NUM_BUCKETS

    def _state(self) -> None:
        assert {state.checkpoint_id for state in self._ledger.state()} == {"m:1"}

    def _job(self) -> None:
        assert self._ledger.job() == JobRecord(job="a", has_checkpoints=True)


@contextmanager
def refusing(client: redis.Redis, refusal: Refusal) -> Iterator[None]:
    """The server refuses until it has refused a command, which the block must give it."""
    client.config_resetstat()
    refusal.begin(client)
    errors: list[BaseException] = []

    def end() -> None:
        try:
            refusal.end(client)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not errors, errors


def play(url: str, namespace: str, client: redis.Redis, refusal: Refusal) -> None:
    """A job of which the server of `client` refuses a command of each step that it can."""
    with ExitStack() as stack:
        for name, (kind, step) in Steps(url, namespace, stack).by_name().items():
            with refusing(client, refusal) if kind in refusal.of else nullcontext():
                try:
                    step()
                except BaseException as error:
                    error.add_note(f"in the step {name!r}")
                    raise


@pytest.mark.redis
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("binary", list(installed_servers()), ids=lambda path: path.name)
@pytest.mark.parametrize(
    "refusal",
    [NOREPLICAS, BUSY, LOADING, MISCONF, READONLY, TOO_MANY_CLIENTS, MASTERDOWN],
    ids=["NOREPLICAS", "BUSY", "LOADING", "MISCONF", "READONLY", "too many clients", "MASTERDOWN"],
)
def test_one_of_two_servers_refuses_every_step(
    refusal: Refusal, binary: Path, redis_server: EmbeddedServer, tmp_path: Path
) -> None:
    options = {"enable-debug-command": "local"}  # of DEBUG RELOAD
    with EmbeddedServer(tmp_path, binary=binary, options=options) as server, client_of(server.url) as client:
        play(f"{server.url},{redis_server.url}", new_name(), client, refusal)


def forget_a_slot(client: redis.Redis) -> None:
    """Without one of its slots a node serves none of them. It takes the last one of all, which no test uses."""
    client.execute_command("CLUSTER", "DELSLOTS", NUM_SLOTS - 1)


def remember_the_slot(client: redis.Redis) -> None:
    client.execute_command("CLUSTER", "ADDSLOTS", NUM_SLOTS - 1)


CLUSTERDOWN = Refusal(of=ALL - {"connect"}, begin=forget_a_slot, end=after({"CLUSTERDOWN"}, remember_the_slot))


@pytest.fixture
def node_and_name(redis_cluster: ClusterNodes) -> tuple[ClusterNode, str]:
    """The node that is not in the cluster's URL, so that it is not asked where the slots are; and a namespace.

    The node has the schema record and bucket 0; no bucket is in the last slot.
    """
    node = redis_cluster.masters[2]
    while True:
        name = new_name()
        first, *others = (key_slot(bucket_key(name, bucket)) for bucket in range(NUM_BUCKETS))
        slots = {first, key_slot(meta_key(name))}
        if all(redis_cluster.owner_of(slot) is node for slot in slots) and NUM_SLOTS - 1 not in {*slots, *others}:
            return node, name


@pytest.mark.redis
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("refusal", [NOREPLICAS, BUSY, CLUSTERDOWN], ids=["NOREPLICAS", "BUSY", "CLUSTERDOWN"])
def test_one_node_of_a_cluster_refuses_every_step(
    refusal: Refusal, redis_cluster: ClusterNodes, node_and_name: tuple[ClusterNode, str]
) -> None:
    node, name = node_and_name
    try:
        with client_of(node.server.url) as client:
            play(redis_cluster.url, name, client, refusal)
    finally:
        await_true(lambda: all(node.info()["cluster_state"] == "ok" for node in redis_cluster.nodes), "the cluster")


def refused_at(url: str, namespace: str, client: redis.Redis, last: str, setting: str, value: int) -> str:
    """The error of a step, while a server refuses because of a setting and until the deadline."""
    usual = client.config_get(setting)[setting]
    with ExitStack() as stack:
        steps = Steps(url, namespace, stack, timeout_s=TIMEOUT_S).by_name()
        for name, (_, step) in steps.items():
            if name == last:
                break
            step()
        client.config_set(setting, value)
        try:
            with pytest.raises((InputError, StoreError)) as caught:
                steps[last][1]()
        finally:
            client.config_set(setting, usual)
    return str(caught.value)


@pytest.mark.redis
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("last", "setting", "value", "words"),
    [
        ("open", "maxclients", 1, "ERR max number of clients reached"),
        ("claim", "min-replicas-to-write", 1, "NOREPLICAS Not enough good replicas to write"),
        ("acquire", "min-replicas-to-write", 1, "NOREPLICAS Not enough good replicas to write"),
        ("write", "min-replicas-to-write", 1, "NOREPLICAS Not enough good replicas to write"),
    ],
)
def test_a_server_refuses_until_the_deadline(tmp_path: Path, last: str, setting: str, value: int, words: str) -> None:
    with EmbeddedServer(tmp_path) as server, client_of(server.url) as client:
        line = refused_at(server.url, "n", client, last, setting, value)
    assert re.fullmatch(rf".*{server.url}: .*{words}.*; so it answered for store\.timeout_s = 0\.3 s", line)


@pytest.mark.redis
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("last", ["claim", "acquire", "write"])
def test_a_node_refuses_until_the_deadline(
    redis_cluster: ClusterNodes, node_and_name: tuple[ClusterNode, str], last: str
) -> None:
    node, name = node_and_name
    line = refused_at(redis_cluster.url, name, node.client, last, "min-replicas-to-write", 1)
    assert re.fullmatch(r".*within store\.timeout_s = 0\.3 s.*NOREPLICAS Not enough good replicas to write.*", line)
