"""Reads and writes on a real cluster whose slots move and whose nodes stop, die and are replaced."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import RolledBackError, StoreError
from bagpipe.store.interface import Rows
from bagpipe.store.keys import bucket_key, key_slot
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import take_over
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.nodes import ClusterNode, ClusterNodes, await_true, start_cluster

pytestmark = [pytest.mark.alone, pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=16), RowTable(name="item", dim=4)), optimizer="sgd")
NUM_BUCKETS = 16
IDS = np.arange(400, dtype=np.int64)


def rows_of(version: int) -> Rows:
    return np.arange(400 * 16, dtype=np.float32).reshape(400, 16) + 10_000 * version


def opened(nodes: ClusterNodes, namespace: str, timeout_s: float = 30.0) -> RedisStore:
    return RedisStore(nodes.url, schema=SCHEMA, namespace=namespace, num_buckets=NUM_BUCKETS, timeout_s=timeout_s)


@contextmanager
def in_a_thread(call: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run `call` in a thread during the block. After the block the list holds its error, if any."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        thread.join()


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ClusterNodes]:
    """A cluster with a replica of its first master, private to one test."""
    with start_cluster(tmp_path, num_replicas=1, node_timeout_ms=1000) as nodes:
        yield nodes


def test_every_node_gets_a_few_commands(redis_cluster: ClusterNodes, namespace: str) -> None:
    with opened(redis_cluster, namespace) as store:
        before = [node.num_calls("hset") for node in redis_cluster.masters]
        store.write(0, IDS, rows_of(0))
        calls = [node.num_calls("hset") - old for node, old in zip(redis_cluster.masters, before, strict=True)]
        assert sum(calls) == NUM_BUCKETS, "one command per bucket"
        assert min(calls) > 0
        assert (store.read(0, IDS).rows == rows_of(0)).all()
        assert (store.statistics().moved, store.statistics().asked) == (0, 0)


# Slots that move


def test_a_slot_that_moves_step_by_step(redis_cluster: ClusterNodes, namespace: str) -> None:
    """ASK for a bucket that does not exist yet, ASK for a bucket that has moved, then MOVED."""
    nodes, slot = redis_cluster, key_slot(bucket_key(namespace, 3))
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    try:
        with opened(nodes, namespace) as store:
            nodes.begin_move(slot, source, target)
            store.write(0, IDS, rows_of(0))
            asked = store.statistics().asked
            assert asked == 1, "a bucket without rows is made where it goes"
            assert (store.read(0, IDS).rows == rows_of(0)).all()
            assert store.statistics().asked == 2
            nodes.move_keys(slot, source, target)
            store.write(0, IDS, rows_of(1))
            assert (store.read(0, IDS).rows == rows_of(1)).all()
            assert (store.ids(0) == IDS).all()
            assert store.statistics().moved == 0
            nodes.end_move(slot, target)
            store.write(0, IDS, rows_of(2))
            assert (store.read(0, IDS).rows == rows_of(2)).all()
            assert store.statistics().moved == 2, "the writer and the reader hear of it once each"
            store.write(0, IDS, rows_of(3))
            assert (store.read(0, IDS).rows == rows_of(3)).all()
            assert store.statistics().moved == 2
            assert (store.ids(0) == IDS).all()
            assert store.statistics().failovers == 0
    finally:
        nodes.move(slot, target, source)


def test_resharding_while_rows_are_read_and_written(redis_cluster: ClusterNodes, namespace: str) -> None:
    """One thread writes versions and another reads while slots move: versions never go back, none is lost."""
    nodes, done = redis_cluster, threading.Event()
    slots = sorted({key_slot(bucket_key(namespace, bucket)) for bucket in range(NUM_BUCKETS)})
    moves = []  # one slot of each master, to the next and back
    for number, home in enumerate(nodes.masters):
        slot = next(slot for slot in slots if nodes.owner_of(slot) is home)
        other = nodes.masters[number - 1]
        moves += [(slot, home, other), (slot, other, home)]
    versions_written = [0]
    versions_read = [0.0]

    def write() -> None:
        while not done.is_set():
            version = versions_written[-1] + 1
            store.write(0, IDS, rows_of(version))
            versions_written.append(version)

    def read() -> None:
        while not done.is_set():
            result = store.read(0, IDS)
            assert result.found.all()
            versions = (result.rows - rows_of(0))[:, 0] / 10_000
            assert (result.rows - rows_of(0) == 10_000 * versions[:, None]).all(), "a torn row"
            assert versions.min() >= versions_read[-1], "an old version came back"
            versions_read.append(float(versions.min()))

    def a_round_passes() -> None:
        """Wait until both threads have started and finished a batch, or failed."""
        writes, reads = len(versions_written) + 2, len(versions_read) + 2
        await_true(
            lambda: bool(errors or others) or (len(versions_written) >= writes and len(versions_read) >= reads),
            "a read and a write",
        )

    with opened(nodes, namespace) as store:
        store.write(0, IDS, rows_of(0))
        with in_a_thread(write) as errors, in_a_thread(read) as others:
            try:
                for slot, source, target in moves:
                    nodes.begin_move(slot, source, target)
                    a_round_passes()
                    nodes.move_keys(slot, source, target)
                    a_round_passes()
                    nodes.end_move(slot, target)
                    a_round_passes()
            finally:
                done.set()
        assert not errors, errors
        assert not others, others
        statistics = store.statistics()
        assert statistics.asked > 0
        assert statistics.moved > 0
        assert (store.read(0, IDS).rows == rows_of(versions_written[-1])).all()
        assert (store.ids(0) == IDS).all()


def test_a_slot_that_no_node_serves_for_a_while(redis_cluster: ClusterNodes, namespace: str) -> None:
    slot = key_slot(bucket_key(namespace, 0))
    owner = redis_cluster.owner_of(slot)
    with opened(redis_cluster, namespace) as store:
        store.write(0, IDS, rows_of(0))
        before = owner.num_errors("CLUSTERDOWN")
        owner.cluster("DELSLOTS", slot)
        try:
            with in_a_thread(lambda: store.write(0, IDS, rows_of(1))) as errors:
                await_true(lambda: owner.num_errors("CLUSTERDOWN") > before, "the refusal")
                owner.cluster("ADDSLOTS", slot)
            assert not errors, errors
            assert (store.read(0, IDS).rows == rows_of(1)).all()
        finally:
            await_true(lambda: all(node.info()["cluster_state"] == "ok" for node in redis_cluster.nodes), "the cluster")


def test_a_slot_that_no_node_serves_for_too_long(redis_cluster: ClusterNodes, namespace: str) -> None:
    slot = key_slot(bucket_key(namespace, 0))
    owner = redis_cluster.owner_of(slot)
    with opened(redis_cluster, namespace, timeout_s=0.3) as store:
        owner.cluster("DELSLOTS", slot)
        try:
            with pytest.raises(
                StoreError, match=r"slot \d+ was not served within store\.timeout_s = 0\.3 s: CLUSTERDOWN"
            ):
                store.write(0, IDS, rows_of(1))
            with pytest.raises(StoreError, match="the connection was closed"):
                store.write(0, IDS, rows_of(1))
        finally:
            owner.cluster("ADDSLOTS", slot)
            await_true(lambda: all(node.info()["cluster_state"] == "ok" for node in redis_cluster.nodes), "the cluster")


# Lost connections and nodes


def test_connections_that_are_cut_are_made_again(redis_cluster: ClusterNodes, namespace: str) -> None:
    with opened(redis_cluster, namespace) as store:
        take_over(store)
        store.write(0, IDS, rows_of(0))
        for version in (1, 2):
            for node in redis_cluster.masters:
                node.client.client_kill_filter(_type="normal", skipme=True)
            store.write(0, IDS, rows_of(version))
            assert (store.read(0, IDS).rows == rows_of(version)).all()
        assert store.statistics().failovers == 0
        assert store.statistics().rows_written == 1200
        assert store.statistics().bytes_sent > 3 * rows_of(0).nbytes


def test_a_writer_without_a_fence_ends_with_its_connection(redis_cluster: ClusterNodes, namespace: str) -> None:
    """Commands in flight could still arrive, after newer rows."""
    with opened(redis_cluster, namespace) as store:
        store.write(0, IDS, rows_of(0))
        for node in redis_cluster.masters:
            node.client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreError, match="the server closed the connection"):
            store.write(0, IDS, rows_of(1))
        assert (store.read(0, IDS).rows == rows_of(0)).all()


def test_pending_commands_of_a_silent_node_come_too_late(redis_cluster: ClusterNodes, namespace: str) -> None:
    """A stopped node executes its pending commands when it resumes, before or after they are sent again."""
    nodes = redis_cluster
    stopped = nodes.owner_of(key_slot(bucket_key(namespace, 0)))
    others = [node for node in nodes.masters if node is not stopped]
    with opened(nodes, namespace, timeout_s=20.0) as store:
        store._writing._patience_s = 0.3  # type: ignore[attr-defined]  # a quarter of the deadline else
        take_over(store)
        questions = sum(node.num_calls("cluster|slots") for node in others)
        os.kill(stopped.server.process_id, signal.SIGSTOP)
        try:
            with in_a_thread(lambda: store.write(0, IDS, rows_of(1))) as errors:
                await_true(
                    lambda: sum(node.num_calls("cluster|slots") for node in others) > questions,
                    "another node to be asked",
                )
                os.kill(stopped.server.process_id, signal.SIGCONT)
        finally:
            os.kill(stopped.server.process_id, signal.SIGCONT)
        assert not errors, errors
        assert (store.read(0, IDS).rows == rows_of(1)).all()
        assert (store.rotate() == 1).all(), "each group counts once"


def test_a_replica_takes_over(own_cluster: ClusterNodes, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    """The death of a second master, which has no replica, ends the job within the deadline."""
    nodes = own_cluster
    first, second, _ = nodes.masters
    replica = nodes.nodes[3]
    with opened(nodes, namespace, timeout_s=30.0) as store:
        store.claim()
        take_over(store)
        store.write(0, IDS, rows_of(0))
        await_true(lambda: is_in_step(first), "the replica to have every row")
        os.kill(first.server.process_id, signal.SIGKILL)
        with in_a_thread(lambda: store.write(0, IDS, rows_of(1))) as errors:
            assert (store.read(0, IDS).rows[:, 0] % 10_000 == rows_of(0)[:, 0] % 10_000).all()
        assert not errors, errors
        assert (store.read(0, IDS).rows == rows_of(1)).all()
        assert (store.ids(0) == IDS).all()
        assert store.check() is True
        assert store.statistics().failovers == 2, "the writer's and the reader's"
        assert f"127.0.0.1:{replica.port} took over from 127.0.0.1:{first.port}" in caplog.text
    with opened(nodes, namespace, timeout_s=2.0) as store:
        os.kill(second.server.process_id, signal.SIGKILL)
        with pytest.raises(StoreError, match=r"within store\.timeout_s = 2 s") as caught:
            store.read(0, IDS)
        assert "\n" not in str(caught.value)


def test_a_rolling_restart(own_cluster: ClusterNodes, namespace: str) -> None:
    """A manual failover to the replica, a restart of the old master, and a failover back."""
    nodes, replica = own_cluster, own_cluster.nodes[3]
    first = nodes.masters[0]
    with opened(nodes, namespace) as store:
        take_over(store)
        store.write(0, IDS, rows_of(0))
        hand_over(first.client, replica.client)
        store.write(0, IDS, rows_of(1))
        assert (store.read(0, IDS).rows == rows_of(1)).all()
        await_true(lambda: len(first.client.client_list(_type="normal")) == 1, "links to a former master to be closed")
        first.server.__exit__(None, None, None)
        with EmbeddedServer(first.folder, options=first.options):
            hand_over(replica.client, first.client)
            store.write(0, IDS, rows_of(2))
            assert (store.read(0, IDS).rows == rows_of(2)).all()
        assert store.statistics().moved > 0
        assert store.statistics().failovers == 0


def hand_over(master: redis.Redis, replica: redis.Redis) -> None:
    """Wait until the replica is in sync, and make it the master."""
    await_true(lambda: replica.info("replication").get("master_link_status") == "up", "the replica to follow")
    replica.execute_command("CLUSTER", "FAILOVER")
    await_true(lambda: replica.info("replication")["role"] == "master", "the replica to take over")
    await_true(lambda: master.info("replication")["role"] == "slave", "the master to step down")


def is_in_step(master: ClusterNode) -> bool:
    """Whether the replica has acknowledged every write."""
    return bool(master.client.execute_command("WAIT", 1, 1000))


def test_a_node_that_was_started_again_has_lost_its_rows(tmp_path: Path, namespace: str) -> None:
    with start_cluster(tmp_path) as nodes:
        node = nodes.owner_of(key_slot(bucket_key(namespace, 0)))
        with opened(nodes, namespace) as store:
            take_over(store)
            store.write(0, IDS, rows_of(0))
            node.server.__exit__(None, None, None)
            with EmbeddedServer(node.folder, options=node.options):
                with pytest.raises(
                    StoreError, match=f"{re.escape(node.endpoint)} was started again, its rows may be lost"
                ):
                    store.read(0, IDS)
                with pytest.raises(RolledBackError, match="was started again, its rows may be lost"):
                    store.write(0, IDS, rows_of(0))


def test_guarded_writes_wait_for_a_slot_on_the_move(redis_cluster: ClusterNodes, namespace: str) -> None:
    """A bucket has several keys, one of them only during a write; no write is split between two nodes."""
    nodes, slot = redis_cluster, key_slot(bucket_key(namespace, 3))
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    with opened(nodes, namespace) as store:
        take_over(store)
        store.write(0, IDS, rows_of(0))
        try:
            nodes.begin_move(slot, source, target)
            refused = source.num_errors("TRYAGAIN")
            with in_a_thread(lambda: store.write(0, IDS, rows_of(1))) as errors:
                await_true(lambda: source.num_errors("TRYAGAIN") > refused, "the refusal")
                nodes.move_keys(slot, source, target)
                nodes.end_move(slot, target)
            assert not errors, errors
            assert (store.read(0, IDS).rows == rows_of(1)).all()
            assert (store.rotate() == 2).all()
            store.write(0, IDS, rows_of(2))
            assert (store.read(0, IDS).rows == rows_of(2)).all()
        finally:
            nodes.move(slot, target, source)


def test_many_commands_of_one_bucket_stay_in_order(redis_cluster: ClusterNodes, namespace: str) -> None:
    """Early commands meet a moving slot, later ones may not: these find a gap in the log and wait."""
    nodes, slot = redis_cluster, key_slot(bucket_key(namespace, 0))
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    ids = np.arange(40_000, dtype=np.int64)
    rows = np.repeat(ids[:, None], 16, axis=1).astype(np.float32)
    with RedisStore(nodes.url, schema=SCHEMA, namespace=namespace, num_buckets=1) as store:
        take_over(store)
        store.write(0, ids, rows)
        try:
            nodes.begin_move(slot, source, target)
            refused = source.num_errors("TRYAGAIN")
            with in_a_thread(lambda: store.write(0, ids, rows + 1)) as errors:
                await_true(lambda: source.num_errors("TRYAGAIN") > refused, "the refusal")
                nodes.move_keys(slot, source, target)
                nodes.end_move(slot, target)
            assert not errors, errors
            assert (store.read(0, ids).rows == rows + 1).all()
            assert store.rotate().tolist() == [2 * 40]
        finally:
            nodes.move(slot, target, source)


def test_a_replica_that_lagged_takes_over(own_cluster: ClusterNodes, namespace: str) -> None:
    """The cluster does not report lost rows; the logs reveal them."""
    nodes = own_cluster
    first = nodes.masters[0]
    with opened(nodes, namespace, timeout_s=30.0) as store:
        take_over(store)
        store.write(0, IDS, rows_of(0))
        await_true(lambda: is_in_step(first), "the replica to have every row")
        # A replica that is refused PSYNC tries SYNC.
        first.client.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        first.client.client_kill_filter(_type="replica")
        await_true(lambda: first.client.info("replication")["connected_slaves"] == 0, "the replica to lag")
        store.write(0, IDS, rows_of(1))
        os.kill(first.server.process_id, signal.SIGKILL)
        with pytest.raises(RolledBackError, match="acknowledged 2 groups of rows and has 1 in its log"):
            store.rotate()
        with pytest.raises(RolledBackError, match="acknowledged 2 groups of rows and has 1 in its log"):
            store.write(0, IDS, rows_of(2))
    alive = [node for node in nodes.nodes if node is not first]
    await_true(lambda: all(part[2][1] != first.port for node in alive for part in node.cluster("SLOTS")), "one view")
    with opened(nodes, namespace, timeout_s=30.0) as store:
        assert (store.read(0, IDS).rows[:, 0] % 10_000 == rows_of(0)[:, 0] % 10_000).all()
