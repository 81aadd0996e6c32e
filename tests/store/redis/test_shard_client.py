"""Connections that break at every moment. Real servers, a real proxy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.interface import DeleteRequest, Rows, WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.row_checksum import table_check_words
from bagpipe.store.row_sums import RowSums
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import take_over
from bagpipe.types.schema import RowSchema, RowTable
from tests.harness.proxy import ConnectionFault, ConnectionFaultKind, FaultyProxy

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=16), RowTable(name="item", dim=4)), optimizer="sgd")
NUM_BUCKETS = 4
IDS = np.arange(6_000, dtype=np.int64)
GONE, AGAIN = IDS[::3].copy(), IDS[::2].copy()
DIMS = (16, 4)


def rows_of(version: int, dim: int = 16) -> Rows:
    return np.repeat(IDS[:, None], dim, axis=1).astype(np.float32) + 10_000 * version


def opened(url: str, namespace: str, timeout_s: float = 30.0) -> RedisStore:
    return RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=NUM_BUCKETS, timeout_s=timeout_s)


def num_groups() -> list[int]:
    """Groups of each bucket after a `Workload.run`: one per command."""
    total = np.ones(NUM_BUCKETS, np.int64)  # the deletion
    for ids in (IDS, AGAIN):
        for table, row_bytes in ((0, 64), (1, 16)):
            counts = np.bincount(bucket_of(np.full(1, table, np.uint32), ids, NUM_BUCKETS), minlength=NUM_BUCKETS)
            total += -(-counts // (65_536 // row_bytes))
    return total.tolist()


class Workload:
    """Write all rows, delete some, write half of the rows again; read them, count the groups, compare the sums."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._version = 0
        self._checks = [np.zeros(len(IDS), np.uint64) for _ in DIMS]

    def run(self) -> None:
        first, second = [[rows_of(self._version + number, dim) for dim in DIMS] for number in (1, 2)]
        self._version += 2
        self._write(IDS, first)
        self._store.delete_many([DeleteRequest(table, GONE) for table in (0, 1)])
        for checks in self._checks:
            checks[GONE] = 0
        self._write(AGAIN, second)
        assert self._store.rotate().tolist() == num_groups(), "each group counts once"
        for table, result in enumerate(self._store.read_many([(0, IDS), (1, IDS)])):
            rows = first[table]
            rows[GONE] = 0
            rows[AGAIN] = second[table][AGAIN]
            assert (result.rows == rows).all()
            assert (result.checks == self._checks[table]).all()
        sums = RowSums(NUM_BUCKETS)
        for table, checks in enumerate(self._checks):
            sums.add_rows(np.array([table], np.uint32), IDS, checks)
        assert self._store.sum_changes().to_list() == sums.to_list()

    def _write(self, ids: NDArray[np.int64], rows: list[Rows]) -> None:
        self._store.write_many(
            [WriteRequest(table, ids, rows[table][ids], self._checks[table][ids]) for table in (0, 1)]
        )
        for table in (0, 1):
            self._checks[table][ids] = table_check_words(table, ids, rows[table][ids])


@pytest.fixture
def proxies(redis_servers: tuple[str, ...]) -> Iterator[tuple[FaultyProxy, FaultyProxy]]:
    with ExitStack() as stack:
        first, second, *_ = (stack.enter_context(FaultyProxy(url)) for url in redis_servers[:2])
        yield first, second


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        (ConnectionFaultKind.DROP_ANSWER, 0),
        (ConnectionFaultKind.CUT_ANSWER, 7),
        (ConnectionFaultKind.CUT_REQUEST, 30),
        (ConnectionFaultKind.CUT_REQUEST, 50_000),
        (ConnectionFaultKind.RESET, 0),
    ],
)
def test_one_effect_whichever_answer_is_lost(
    proxies: tuple[FaultyProxy, FaultyProxy], namespace: str, kind: ConnectionFaultKind, num_bytes: int
) -> None:
    first, second = proxies
    with opened(f"{first.url},{second.url}", namespace) as store:
        take_over(store)
        work = Workload(store)
        work.run()
        number = 0
        while True:
            number += 1
            fired = first.num_fired
            first.inject(ConnectionFault(kind=kind, at=number, num_bytes=num_bytes))
            work.run()
            if first.num_fired == fired:
                break
        assert number > 3


def test_a_silent_connection_is_given_up_for_another(proxies: tuple[FaultyProxy, FaultyProxy], namespace: str) -> None:
    first, second = proxies
    with opened(f"{first.url},{second.url}", namespace) as store:
        take_over(store)
        store._writing._patience_s = store._reading._patience_s = 0.2  # type: ignore[attr-defined]  # else 7.5
        work = Workload(store)
        work.run()
        for number in (1, 3):
            first.inject(ConnectionFault(kind=ConnectionFaultKind.SILENCE, at=number))
            work.run()
        assert first.num_fired == 2
        first.heal()
        work.run()


def test_without_a_fence_the_first_loss_ends_it(proxies: tuple[FaultyProxy, FaultyProxy], namespace: str) -> None:
    first, second = proxies
    with opened(f"{first.url},{second.url}", namespace) as store:
        store.write(0, IDS, rows_of(1))
        first.inject(ConnectionFault(kind=ConnectionFaultKind.DROP_ANSWER))
        with pytest.raises(StoreError, match=r"closed the connection|Broken pipe|reset"):
            store.write(0, IDS, rows_of(2))
        with pytest.raises(StoreError, match=r"closed|Broken pipe|reset"):  # the first reason, repeated
            store.write(0, IDS, rows_of(2))
        with pytest.raises(StoreError, match=r"closed|Broken pipe|reset"):
            store.delete_many([DeleteRequest(0, IDS)])
        first.inject(ConnectionFault(kind=ConnectionFaultKind.DROP_ANSWER))
        assert store.read(0, IDS).found.all(), "reading does no harm"
    with opened(f"{first.url},{second.url}", namespace) as store:
        first.inject(ConnectionFault(kind=ConnectionFaultKind.DROP_ANSWER, at=2))  # the rows have been read
        with pytest.raises(StoreError, match=r"closed the connection|Broken pipe|reset"):
            store.delete_many([DeleteRequest(0, IDS)])


def test_a_server_out_of_reach_until_the_deadline(tmp_path: Path) -> None:
    """A server that accepts and closes connections is retried until the deadline."""
    with EmbeddedServer(tmp_path / "own") as server, ExitStack() as stack:
        with FaultyProxy(server.url, listen=tmp_path / "proxy.sock") as proxy:
            store = stack.enter_context(opened(proxy.url, "job", timeout_s=0.4))
            take_over(store)
            store.write(0, IDS, rows_of(1))
            os.kill(server.process_id, signal.SIGKILL)
            with pytest.raises(StoreError, match=r"unreachable until store\.timeout_s = 0\.4 s"):
                store.write(0, IDS, rows_of(2))


def test_a_server_that_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "own") as server, opened(server.url, "job", timeout_s=300.0) as store:
        take_over(store)
        store.write(0, IDS, rows_of(1))
        os.kill(server.process_id, signal.SIGKILL)
        with pytest.raises(StoreError, match="cannot be reached"):
            store.write(0, IDS, rows_of(2))
        with pytest.raises(StoreError, match="cannot be reached"):
            store.read(0, IDS)


@pytest.mark.parametrize("durability", ["memory", "always"])
def test_a_server_that_comes_back_as_another_process(tmp_path: Path, durability: str) -> None:
    """Behind a proxy, so that only the connection breaks. Fails even if the server has all rows."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(tmp_path / "own", durability=durability))
        proxy = stack.enter_context(FaultyProxy(server.url, listen=tmp_path / "proxy.sock"))
        store = stack.enter_context(opened(proxy.url, "job"))
        take_over(store)
        store.write(0, IDS, rows_of(1))
        server.__exit__(None, None, None)
        stack.enter_context(EmbeddedServer(tmp_path / "own", durability=durability))
        for _ in range(2):
            with pytest.raises(RolledBackError, match="was started again, its rows may be lost"):
                store.write(0, IDS, rows_of(2))
        with pytest.raises(RolledBackError, match="was started again, its rows may be lost"):
            store.read(0, IDS)


@pytest.mark.parametrize("deletes", [False, True], ids=["writes", "deletes"])
def test_a_zombie_that_retries_is_fenced(
    proxies: tuple[FaultyProxy, FaultyProxy], namespace: str, deletes: bool
) -> None:
    """The rejection is lost; the repeated group is rejected again."""
    first, second = proxies
    url = f"{first.url},{second.url}"
    with opened(url, namespace) as zombie, opened(url, namespace) as job:
        take_over(zombie)
        zombie.write(0, IDS, rows_of(1))
        take_over(job, generation=2)
        job.write(0, IDS, rows_of(3))
        fired = first.num_fired + second.num_fired
        for proxy in proxies:  # in any order
            proxy.inject(ConnectionFault(kind=ConnectionFaultKind.DROP_ANSWER))
        for _ in range(2):
            with pytest.raises(FencedError, match="generation 2, this one is 1"):
                zombie.delete_many([DeleteRequest(0, IDS)]) if deletes else zombie.write(0, IDS, rows_of(4))
        assert first.num_fired + second.num_fired > fired
        assert (job.read(0, IDS).rows == rows_of(3)).all()
