"""An append-only file, cut at any byte or behind a sync, holds each group of rows with its log entry, or neither."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bagpipe.store.interface import Store
from bagpipe.store.keys import bucket_of
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import MakeStore, holds, ids_of, rows_of, simulated_job, unfenced
from bagpipe.types.schema import RowSchema
from tests.harness.clock import find_compiler
from tests.harness.held_sync import HeldSync
from tests.store.clients import client_of

pytestmark = pytest.mark.redis

NUM_BUCKETS, NUM_WAVES, NUM_CUTS = 4, 12, 24
#: A machine that stands still for two seconds between two commands shows nothing.
_ATTEMPTS = 5
OPTIONS = {"appendonly": "yes", "appendfsync": "no", "aof-load-truncated": "yes"}


def wave(number: int) -> tuple[int, int]:
    """First and last + 1 id written by a wave; four waves write each row."""
    return 5 * number, 5 * number + 20


def maker(server: EmbeddedServer) -> MakeStore:
    def make(schema: RowSchema, name: str) -> Store:
        return open_store(server.url, namespace=name, schema=schema, buckets=NUM_BUCKETS)

    return make


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a server that a job has written twelve waves to."""
    folder = tmp_path_factory.mktemp("whole")
    with EmbeddedServer(folder, options=OPTIONS) as server:
        with simulated_job(maker(server), "job", 1) as job:
            for number in range(NUM_WAVES):
                job.write(ids_of(wave(number)), float(number))
    return folder


def test_groups_are_never_torn(whole: Path, tmp_path: Path) -> None:
    [file] = (whole / "appendonlydir").glob("*.incr.aof")
    cuts = np.random.default_rng(3).choice(file.stat().st_size, NUM_CUTS, replace=False)
    seen = set()
    for cut in sorted(int(cut) for cut in cuts):
        folder = tmp_path / f"{cut}"
        shutil.copytree(whole / "appendonlydir", folder / "appendonlydir")
        with (folder / "appendonlydir" / file.name).open("r+b") as aof:
            aof.truncate(cut)
        with EmbeddedServer(folder, options=OPTIONS) as server:
            seen.add(check(server))
    assert len(seen) > NUM_WAVES // 2, "the cuts fell into different groups"


def check(server: EmbeddedServer) -> tuple[int, ...]:
    """Assert that every bucket has the rows of the groups in its log. Returns the groups per log; -1: no log."""
    counts = []
    ids = ids_of((0, wave(NUM_WAVES)[1]))
    buckets = bucket_of(np.zeros(len(ids), np.uint32), ids, NUM_BUCKETS)
    with unfenced(maker(server), "job") as (store, ledger):
        found = store.read(0, ids)
        for bucket, state in enumerate(ledger.state()):
            [count] = [log.num_groups for log in state.logs if log.epoch == 1] or [-1]
            counts.append(count)
            expected = dict[int, float]()
            members = ids[buckets == bucket]
            waves = [n for n in range(NUM_WAVES) if np.any((members >= wave(n)[0]) & (members < wave(n)[1]))]
            for number in waves[: max(count, 0)]:
                first, end = wave(number)
                expected |= {int(one): float(number) for one in members if first <= one < end}
            there = ids[(buckets == bucket) & found.found]
            assert there.tolist() == sorted(expected)
            values = np.array([expected[one] for one in there.tolist()])
            rows = found.rows[(buckets == bucket) & found.found]
            assert all((rows[at] == rows_of(0, there[at : at + 1], values[at])[0]).all() for at in range(len(there)))
    with client_of(server.url) as client:
        assert not client.keys("*shield*")
    return tuple(counts)


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(("durability", "is_lossy"), [("everysec", True), ("always", False)])
def test_a_server_that_is_killed_while_its_disk_syncs(durability: str, is_lossy: bool, tmp_path: Path) -> None:
    """Under `everysec` a server acknowledges groups that it writes to its file after the sync, up to two seconds later.

    What is left is a prefix, and the logs tell its length.
    """
    disk, kept, acknowledged = HeldSync(tmp_path), 0, 0
    for attempt in range(_ATTEMPTS if is_lossy else 1):
        folder = tmp_path / f"{attempt}"
        kept, acknowledged = kill_while_syncing(folder, durability, disk)
        assert 0 < kept <= acknowledged
        if kept < acknowledged:
            break
    assert (kept < acknowledged) == is_lossy


def kill_while_syncing(folder: Path, durability: str, disk: HeldSync) -> tuple[int, int]:
    """Groups that a server has after it was killed, and those that it had acknowledged."""
    ids, acknowledged = ids_of((0, 1)), 0
    with ExitStack() as stack:
        server = EmbeddedServer(folder, durability=durability)
        with disk.applied():
            stack.enter_context(server)
        with simulated_job(maker(server), "job", 1) as job:
            job.write(ids, 1.0)
            acknowledged += 1
            if durability == "everysec":
                disk.hold()
                while not disk.is_waiting:
                    acknowledged += 1
                    job.write(ids, float(acknowledged))
                for _ in range(3):
                    acknowledged += 1
                    job.write(ids, float(acknowledged))
            os.kill(server.process_id, signal.SIGKILL)
            disk.release()
    with EmbeddedServer(folder, durability=durability) as server, unfenced(maker(server), "job") as (store, ledger):
        groups = sum(log.num_groups for state in ledger.state() for log in state.logs if log.epoch == 1)
        assert holds(store, ids, float(groups)), "the rows of the last group in the log"
        return groups, acknowledged
