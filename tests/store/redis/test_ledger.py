"""The ledger when servers misbehave. Its normal work is tested by the conformance suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger, checkpoint_id_key, invalidated, log_key, logs_key, owner_key
from bagpipe.store.keys import FIELD_DTYPE, bucket_key, key_slot
from bagpipe.store.redis.servers import KeyCommand
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import SCHEMA, holds, ids_of, new_token, rows_of, take_over, touched_ids
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes, await_true

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

IDS = ids_of((0, 200))
NUM_BUCKETS = 4


class LedgerJob:
    """A job on a private server."""

    def __init__(self, server: EmbeddedServer, client: redis.Redis, stack: ExitStack, num_buckets: int) -> None:
        self.server = server
        self.client = client
        self.token = new_token(1)
        self.store = stack.enter_context(
            RedisStore(server.url, schema=SCHEMA, namespace="job", num_buckets=num_buckets, timeout_s=10.0)
        )
        self.ledger: Ledger = stack.enter_context(self.store.ledger())
        self.ledger.acquire(self.token)
        self.ledger.begin("m:0", 1)
        self.store.fence(Fence(token=self.token, writer=0, epoch=1))
        self.store.write(0, IDS, rows_of(0, IDS, 1.0))
        self.keys = [bucket_key("job", bucket) for bucket in range(num_buckets)]

    def other_ledger(self) -> Ledger:
        """Another ledger of the same job, opened after the change."""
        return self.store.ledger()


@contextmanager
def playing(folder: Path, *, durability: str = "memory", num_buckets: int = NUM_BUCKETS) -> Iterator[LedgerJob]:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(folder, durability=durability))
        client = stack.enter_context(client_of(server.url))
        yield LedgerJob(server, client, stack, num_buckets)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LedgerJob]:
    with playing(tmp_path / "store") as playground:
        yield playground


def inspected(ledger: Ledger, said: str, kind: type[StoreError] = StoreError) -> None:
    with pytest.raises(kind, match=said) as caught:
        ledger.inspect()
    assert "\n" not in str(caught.value)


def test_a_healthy_server_passes(job: LedgerJob) -> None:
    for _ in range(3):
        job.ledger.inspect()


def test_a_policy_that_drops_rows(job: LedgerJob) -> None:
    job.client.config_set("maxmemory", "100mb")
    job.ledger.inspect()
    job.client.config_set("maxmemory-policy", "allkeys-lru")
    inspected(job.ledger, "drops rows when full: maxmemory 104857600 with maxmemory-policy allkeys-lru")


def test_rows_evicted_for_lack_of_memory(job: LedgerJob) -> None:
    """Also after the policy was restored."""
    for name in "ab":
        job.client.set(name, bytes(8 << 20))
    job.client.config_set("maxmemory-policy", "allkeys-lru")
    job.client.config_set("maxmemory", job.client.info("memory")["used_memory"] - (4 << 20))
    await_true(lambda: job.client.info("stats")["evicted_keys"] > 0, "a key to be dropped")
    job.client.config_set("maxmemory", "0")
    job.client.config_set("maxmemory-policy", "noeviction")
    inspected(job.ledger, r"has evicted keys: evicted_keys was 0, is \d+")


def test_a_server_that_syncs_less_often_than_it_did(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(tmp_path, durability="always"))
        client = stack.enter_context(client_of(server.url))
        ledger = stack.enter_context(RedisStore(server.url, schema=SCHEMA, durability="always").ledger())
        client.config_set("appendfsync", "no")
        inspected(ledger, "appendfsync is now no, but store.durability is always")


def test_flushall_is_seen(job: LedgerJob) -> None:
    job.client.flushall()
    inspected(job.ledger, "has forgotten its owner, expected '1-.*rows may be lost", RolledBackError)
    for change in (lambda: job.ledger.commit("m:1", 1), lambda: job.ledger.invalidate("x")):
        with pytest.raises(RolledBackError):
            change()
    with pytest.raises(RolledBackError):
        job.store.write(0, IDS, rows_of(0, IDS, 2.0))
    with pytest.raises(RolledBackError):
        job.store.rotate()


def test_a_server_that_was_started_again(tmp_path: Path) -> None:
    """Even if it has rows, because they may be old."""
    folder = tmp_path / "store"
    with playing(folder, durability="always") as job:
        with lose_power(job, folder, {}):
            inspected(job.ledger, "was started again while the job ran: run_id was .*, is .*; rows may be lost")
            assert (touched_ids(job.ledger) == IDS).all()
            assert {state.checkpoint_id for state in job.ledger.state()} == {"m:0"}


def test_a_call_is_repeated_until_the_server_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with playing(folder, durability="always") as job, ExitStack() as stack:
        socket_path = Path(job.server.url.removeprefix("unix://"))
        os.kill(job.server.process_id, signal.SIGKILL)
        await_true(lambda: not answers(job.client), "the server's end")
        errors: list[BaseException] = []

        def commit() -> None:
            try:
                job.ledger.commit("m:1", 1)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        again = stack.enter_context(EmbeddedServer(tmp_path / "next", options=aof_of(folder)))
        socket_path.unlink()
        socket_path.symlink_to(again.url.removeprefix("unix://"))
        thread.join()
        assert not errors, errors
        assert {state.checkpoint_id for state in job.ledger.state()} == {"m:1"}


def lengths_of_aof(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in (folder / "appendonlydir").glob("*.aof")}


@contextmanager
def lose_power(job: LedgerJob, folder: Path, lengths: dict[Path, int]) -> Iterator[None]:
    """The server dies, and another process at its address continues with older data."""
    socket_path = Path(job.server.url.removeprefix("unix://"))
    os.kill(job.server.process_id, signal.SIGKILL)
    await_true(lambda: not answers(job.client), "the server's end")
    for path, length in lengths.items():
        os.truncate(path, length)
    with EmbeddedServer(folder.parent / "next", options=aof_of(folder)) as again:
        socket_path.unlink()
        socket_path.symlink_to(again.url.removeprefix("unix://"))
        yield


def test_a_commit_at_a_server_that_forgot_groups(tmp_path: Path) -> None:
    """The groups were counted and the checkpoint published; then the server restarted unnoticed."""
    folder = tmp_path / "store"
    with playing(folder, durability="always") as job:
        lengths = lengths_of_aof(folder)
        job.store.write(0, IDS, rows_of(0, IDS, 2.0))
        num_groups = job.store.rotate().tolist()
        with lose_power(job, folder, lengths):
            with pytest.raises(RolledBackError, match="bucket 0 has lost rows that were written"):
                job.ledger.commit("m:1", 1, [num_groups])
            assert {state.checkpoint_id for state in job.ledger.state()} == {"m:0"}


def test_a_recovery_detects_lost_recovered_rows(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with playing(folder, durability="always") as job:
        token = new_token(2)
        job.ledger.acquire(token)
        lengths = lengths_of_aof(folder)
        job.store.fence(Fence(token=token, writer=0, epoch=0))
        job.store.write(0, IDS, rows_of(0, IDS, 2.0))
        num_groups = job.store.rotate().tolist()
        with lose_power(job, folder, lengths):
            with pytest.raises(RolledBackError, match="bucket 0 has lost rows that were written"):
                job.ledger.begin("m:1", 1, num_groups=num_groups)
            assert {state.checkpoint_id for state in job.ledger.state()} == {"m:0"}


def aof_of(folder: Path) -> dict[str, str]:
    """Options of a server that continues another's append-only file."""
    return {"dir": str(folder), "appendonly": "yes", "appendfsync": "always"}


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_a_server_that_does_not_come_back(tmp_path: Path) -> None:
    with playing(tmp_path / "store") as job:
        ledger = RedisStore(job.server.url, schema=SCHEMA, namespace="job", num_buckets=4, timeout_s=0.3).ledger()
        with ledger:
            os.kill(job.server.process_id, signal.SIGKILL)
            with pytest.raises(StoreError, match=r"store unix:.* cannot be reached|closed"):
                ledger.state()


def test_a_server_that_became_a_replica(job: LedgerJob) -> None:
    job.client.replicaof("127.0.0.1", 1)
    inspected(job.ledger, "changed its role from master to slave")


def expire_something(client: redis.Redis, key: bytes) -> None:
    before = client.info("stats")["expired_keys"]
    client.pexpire(key, 1)

    def is_gone() -> bool:
        client.exists(key)
        return bool(client.info("stats")["expired_keys"] > before)

    await_true(is_gone, "a key to expire")


def test_others_may_let_their_keys_expire(job: LedgerJob) -> None:
    job.client.set("another", "user's")
    expire_something(job.client, b"another")
    job.ledger.inspect()


@pytest.mark.parametrize(
    "kind", [lambda key: key, owner_key, checkpoint_id_key, logs_key], ids=["rows", "owner", "checkpoint_id", "logs"]
)
def test_our_keys_must_not_expire(job: LedgerJob, kind: type) -> None:
    key: bytes = kind(job.keys[2])
    with job.other_ledger() as ledger:
        job.client.pexpire(key, 1_000_000)
        job.client.set("another", "user's")
        ledger.inspect()  # no key has expired yet
        expire_something(job.client, b"another")
        inspected(ledger, f"the key {key.decode()} expires in .* s; rows must not expire".replace("{", r"\{"))
    with job.other_ledger() as ledger:
        expire_something(job.client, key)
        inspected(ledger, f"the key {key.decode()} has expired; rows must not expire".replace("{", r"\{"))


def test_a_missing_log_invalidates_the_checkpoint_id(job: LedgerJob) -> None:
    """The rows in the missing log are unknown."""
    fence = Fence(token=job.token, writer=0, epoch=1)
    job.client.delete(log_key(job.keys[1], fence))
    assert [state.checkpoint_id for state in job.ledger.state()] == ["m:0", invalidated("m:0"), "m:0", "m:0"]
    with pytest.raises(RolledBackError, match=r"has lost the log 1-.*:1:0 of bucket 1"):
        job.ledger.touched(1)
    job.ledger.acquire(new_token(2))
    assert [state.checkpoint_id for state in job.ledger.state()] == ["m:0", invalidated("m:0"), "m:0", "m:0"]
    job.ledger.begin("m:1", 1)
    assert {state.checkpoint_id for state in job.ledger.state()} == {"m:1"}


def test_the_list_of_logs_is_gone(job: LedgerJob) -> None:
    """Without logs it is unknown which rows differ from the checkpoint."""
    job.client.delete(logs_key(job.keys[1]))
    with pytest.raises(RolledBackError, match=r"job:.1.: the store has lost the log of this job"):
        job.store.rotate()
    for generation in (2, 3):
        job.ledger.acquire(new_token(generation))
        assert [state.checkpoint_id for state in job.ledger.state()] == ["m:0", invalidated("m:0"), "m:0", "m:0"]


def test_a_log_that_is_cut_while_it_is_read(job: LedgerJob, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Fence(token=job.token, writer=0, epoch=1)
    ask = job.ledger._run  # type: ignore[attr-defined]

    def cut_then_ask(commands: list[KeyCommand]) -> list[object]:
        if commands[0].words[0] == "LRANGE":
            job.client.ltrim(log_key(job.keys[1], fence), 0, 0)
        answers: list[object] = ask(commands)
        return answers

    monkeypatch.setattr(job.ledger, "_run", cut_then_ask)
    with pytest.raises(RolledBackError, match=r"has lost some of the log 1-.*:1:0"):
        job.ledger.touched(1)


def test_a_log_with_foreign_entries(job: LedgerJob) -> None:
    job.client.rpush(log_key(job.keys[1], Fence(token=job.token, writer=0, epoch=1)), "strange")
    with pytest.raises(StoreError, match=r"the log .* of bucket 1 is damaged"):
        job.ledger.touched(1)


def test_a_bucket_that_is_no_hash(job: LedgerJob) -> None:
    job.client.delete(job.keys[1])
    job.client.set(job.keys[1], "strange")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        job.ledger.state()


def test_more_rows_than_are_read_at_once(job: LedgerJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagpipe.store.redis.ledger._LOG_GROUPS", 3)
    monkeypatch.setattr("bagpipe.store.redis.ledger._FOLD_ROWS", 50)
    expected = [IDS]
    rng = np.random.default_rng(0)
    for _ in range(40):
        ids = np.unique(rng.integers(-500, 500, 30))
        job.store.write(0, ids, rows_of(0, ids, 2.0))
        expected.append(ids)
    assert (touched_ids(job.ledger) == np.unique(np.concatenate(expected))).all()


def test_fields_of_the_logs_are_those_of_the_rows(job: LedgerJob) -> None:
    for bucket, key in enumerate(job.keys):
        fields = job.ledger.touched(bucket)
        assert fields.dtype == FIELD_DTYPE
        assert fields.view("V12").tolist() == sorted(job.client.hkeys(key))


def test_killed_in_the_middle_of_a_commit(tmp_path: Path) -> None:
    """Some buckets have the new checkpoint id, others the old one, each with its logs."""
    with playing(tmp_path / "store") as job:
        job.store.rotate()
        late = ids_of((1_000, 1_100))
        job.store.write(0, late, rows_of(0, late, 1.0))
        program = (
            "import sys; from bagpipe.store.redis.store import RedisStore\n"
            "from bagpipe.store.fencing.fence import Fence\n"
            "from bagpipe.testing.fence_jobs import SCHEMA\n"
            "store = RedisStore(sys.argv[1], schema=SCHEMA, namespace='job', num_buckets=4)\n"
            "with store:\n"
            "    store.fence(Fence(token=sys.argv[2], writer=0, epoch=9))\n"
            "    with store.ledger() as ledger: ledger.commit('m:1', 1)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, job.server.url, job.token],
            env=os.environ | {"BAGPIPE_CRASH_AT": "mid-commit"},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        states = job.ledger.state()
        assert [state.checkpoint_id for state in states] == ["m:1", "m:0", "m:0", "m:0"]
        assert [[log.epoch for log in state.logs] for state in states] == [[2], [1, 2], [1, 2], [1, 2]]
        job.ledger.commit("m:1", 1)
        assert (touched_ids(job.ledger) == late).all()
        assert holds(job.store, np.concatenate([IDS, late]), 1.0)


def test_owners_are_looked_up_in_turn(tmp_path: Path) -> None:
    """Bounds the cost of an inspection of many buckets."""
    with playing(tmp_path / "store", num_buckets=256) as job:
        job.client.set(owner_key(job.keys[200]), new_token(2))
        job.client.config_resetstat()
        for _ in range(3):
            job.ledger.inspect()
        assert job.client.info("commandstats")["cmdstat_get"]["calls"] == 3 * 64
        inspected(job.ledger, "was taken over: its owner is the job '2-", FencedError)


def test_a_moving_slot_is_not_taken_over_partially(redis_cluster: ClusterNodes, namespace: str) -> None:
    """The earlier writer could still write into a log that has not been moved yet."""
    nodes, slot = redis_cluster, key_slot(bucket_key(namespace, 0))
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    zombie, store = (
        RedisStore(nodes.url, schema=SCHEMA, namespace=namespace, num_buckets=1, timeout_s=timeout_s)
        for timeout_s in (10.0, 0.3)
    )
    with zombie, store, store.ledger() as ledger:
        log = log_key(bucket_key(namespace, 0), take_over(zombie))
        zombie.write(0, IDS, rows_of(0, IDS, 1.0))
        nodes.begin_move(slot, source, target)
        try:
            keys = set(source.cluster("GETKEYSINSLOT", slot, 100)) - {log}
            for key in keys:
                source.client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 10_000)
            for call in (ledger.state, partial(ledger.acquire, new_token(2))):
                with pytest.raises(StoreError, match="Multiple keys request during rehashing of slot"):
                    call()
            nodes.move_keys(slot, source, target)
            nodes.end_move(slot, target)
            ledger.acquire(new_token(2))
            with pytest.raises(FencedError):
                zombie.write(0, IDS, rows_of(0, IDS, 9.0))
            assert holds(store, IDS, 1.0)
        finally:
            nodes.move_keys(slot, source, target)
            nodes.end_move(slot, target)
            nodes.move(slot, target, source)
