"""The process of a store's client: its faults, its end, its memory. What it stores: tests/store/test_conformance.py."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError, StoreError
from bagpipe.store.interface import WriteRequest
from bagpipe.store.open import open_store
from bagpipe.store.process.store import ProcessStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.process.fork_server import ForkServer

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

ROOT = Path(__file__).parents[3]
SCHEMA = RowSchema(tables=(RowTable(name="a", dim=4), RowTable(name="b", dim=2)), optimizer="sgd")


@pytest.fixture(scope="module")
def children() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture
def make(request, redis_server: EmbeddedServer, children: ForkServer):
    def make(*, forks: bool = True, **more) -> ProcessStore:
        starts = {"start": children.start} if forks else {}
        namespace = f"process-{request.node.originalname}"
        return ProcessStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=8, **starts, **more)

    return make


def ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64)


def rows(count: int, value: float) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


def wait_for_end(pidfd: int) -> bool:
    """Whether a process ends within a minute."""
    return bool(select.select([pidfd], [], [], 60.0)[0])


def test_results_outlive_later_reads_and_the_store(make):
    with make() as store:
        store.write(0, ids(100), rows(100, 1.0))
        held = []
        for value in range(12):  # more than there are regions
            store.write(0, ids(100), rows(100, value))
            held.append(store.read(0, ids(100)))
        assert [float(result.rows.max()) for result in held] == [*map(float, range(12))]
    assert [float(result.rows.max()) for result in held] == [*map(float, range(12))]
    del held


def test_rows_of_many_exchanges_are_one_result(make):
    with make(region_bytes=4096) as store:
        values = np.arange(4000, dtype=np.float32).reshape(1000, 4)
        store.write_many([WriteRequest(0, ids(1000), values), WriteRequest(1, ids(0), np.zeros((0, 2), np.float32))])
        first, none, second = store.read_many([(0, ids(1000)), (1, ids(0)), (1, ids(3))])
    assert first.rows.tobytes() == values.tobytes()
    assert (none.rows.shape, second.found.tolist()) == ((0, 2), [False] * 3)


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_killed_process_is_one_error(make, call):
    with make(forks=False) as store:
        os.kill(store.pid, signal.SIGKILL)
        calls = {"read": lambda: store.read(0, ids(1)), "write": lambda: store.write(0, ids(1), rows(1, 1.0))}
        line = rf"the store's process {store.pid} ended unexpectedly \(signal SIGKILL\)"
        for _ in range(2):
            with pytest.raises(StoreError, match=line):
                calls[call]()


def test_a_stopped_process_is_an_error_after_the_deadline(make):
    with make(timeout_s=1.0) as store:
        os.kill(store.pid, signal.SIGSTOP)
        with pytest.raises(StoreError, match="has been stopped for 1 s"):
            store.read(0, ids(1))


def test_a_process_that_goes_on_in_time_has_lost_nothing(make):
    with make() as store:
        store.write(0, ids(5), rows(5, 3.0))
        os.kill(store.pid, signal.SIGSTOP)
        continues = subprocess.Popen([sys.executable, "-c", f"import os; os.kill({store.pid}, 18)"])
        assert store.read(0, ids(5)).rows.tobytes() == rows(5, 3.0).tobytes()
        assert continues.wait() == 0


@pytest.mark.parametrize("call", ["read", "write"])
def test_an_interrupted_exchange_leaves_nothing_behind(make, call):
    """Neither its reply nor its rows are taken for those of the next one."""
    with make() as store:
        store.write(0, ids(50), rows(50, 1.0))
        calls = {"read": lambda: store.read(0, ids(50)[::-1]), "write": lambda: store.write(0, ids(9), rows(9, 2.0))}
        os.kill(store.pid, signal.SIGSTOP)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)

        def interrupted() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            calls[call]()

        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted()
        finally:
            signal.signal(signal.SIGALRM, before)
        os.kill(store.pid, signal.SIGCONT)
        store.write(0, ids(30), rows(30, 3.0))
        found = store.read(0, ids(60))
    assert found.found.tolist() == [True] * 50 + [False] * 10
    assert found.rows[:, 0].tolist() == [3.0] * 30 + [1.0] * 20 + [0.0] * 10


def test_schemas_and_buckets_of_any_number(redis_server: EmbeddedServer, children: ForkServer):
    """Neither fits into a packet."""
    tables = tuple(RowTable(name=f"table with a long name {number}", dim=1) for number in range(5000))
    schema = RowSchema(tables=tables, optimizer="sgd")
    with ProcessStore(
        redis_server.url, schema=schema, namespace="large", num_buckets=1 << 14, start=children.start
    ) as store:
        requests = [(number, ids(2)) for number in range(len(tables))]
        store.write_many([WriteRequest(number, own, np.ones((2, 1), np.float32)) for number, own in requests])
        assert all(result.found.all() for result in store.read_many(requests))
        assert store.sum_changes().num_buckets == 1 << 14


def test_signals_of_a_terminal_and_of_a_launcher_do_not_end_it(make):
    with make() as store:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(store.pid, number)
        assert not store.read(0, ids(1)).found.any()


_PROGRAM = """
import sys
from tests.store.process.test_store import SCHEMA
from bagpipe.store.process.store import ProcessStore

store = ProcessStore(sys.argv[1], schema=SCHEMA, namespace="killed", num_buckets=8).__enter__()
print(store.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.multiproc
def test_it_ends_with_a_killed_training_process(redis_server: EmbeddedServer):
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, redis_server.url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        pidfd = os.pidfd_open(int(program.stdout.readline()))
        program.kill()
        try:
            assert wait_for_end(pidfd)
        finally:
            os.close(pidfd)


def test_it_imports_no_torch(make):
    with make(forks=False) as store:
        maps = Path(f"/proc/{store.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" in maps


def test_an_unreachable_server_is_the_error_of_entering(tmp_path, children):
    store = ProcessStore(
        f"unix://{tmp_path}/none.sock", schema=SCHEMA, namespace="n", timeout_s=1.0, start=children.start
    )
    with pytest.raises(InputError, match=r"none\.sock"), store:
        pass
    with pytest.raises(StoreError, match="not open"):
        store.read(0, ids(1))


def test_a_memory_store_has_no_process():
    with pytest.raises(InputError, match=r"store\.client is process, but memory:// keeps rows in the training process"):
        open_store("memory://", namespace="n", schema=SCHEMA, client="process")
