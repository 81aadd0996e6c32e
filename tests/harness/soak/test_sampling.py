from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.harness.chaos.hosts import StoreHost
from tests.harness.soak.sampling import folder_bytes, process_values, store_values


def test_a_process_is_counted() -> None:
    before = process_values(os.getpid())
    held, release = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)], threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    after = process_values(os.getpid())
    release.set()
    thread.join()
    for descriptor in held:
        os.close(descriptor)
    assert after["fds"] - before["fds"] == 5
    assert after["threads"] - before["threads"] == 1
    assert before["rss_bytes"] > 10 << 20


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with pytest.raises(ProcessLookupError, match=f"process {gone.pid} has ended"):
        process_values(gone.pid)


@pytest.mark.redis
def test_store_values(tmp_path: Path) -> None:
    with StoreHost(tmp_path, durable=False) as store:
        before = store_values(store.client)["used_bytes"]
        store.client.set("x", bytes(1 << 20))
        assert store_values(store.client)["used_bytes"] - before >= 1 << 20


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(bytes(1000))
    os.link(tmp_path / "a" / "one", tmp_path / "two")
    assert folder_bytes(tmp_path) == 1000
