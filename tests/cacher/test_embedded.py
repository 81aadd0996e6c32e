"""The embedded cacher lives and dies with its job."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bagpipe.client.address import parse_address
from bagpipe.errors import InputError
from bagpipe.util.temporary_folder import temporary_folder
from cacher.embedded import EmbeddedCacher
from tests.cacher.daemons import (
    ROOT,
    all_batches,
    assert_same_batches,
    children_of,
    config,
    planned_batches,
    remote,
    spec_of,
)

pytestmark = pytest.mark.multiproc


def is_gone(pid: int) -> bool:
    return (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


def child_of(cacher: EmbeddedCacher) -> int:
    assert cacher.pid is not None
    return cacher.pid


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_embedded_cacher_leaves_nothing_behind(world_size: int) -> None:
    job = config()
    with EmbeddedCacher(job) as cacher:
        ours = all_batches(cacher.url, job, world_size, phases=("train", "eval"))
        pid, socket = child_of(cacher), Path(parse_address(cacher.url).path)
        assert stat.S_ISSOCK(socket.stat().st_mode)
    assert is_gone(pid)
    assert not socket.parent.exists()
    for rank in range(world_size):
        expected = planned_batches(job, world_size)[rank] + planned_batches(job, world_size, "eval")[rank]
        assert_same_batches(ours[rank], expected)


def test_its_socket_may_be_in_a_folder_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job = config()
    with temporary_folder("a b%41?caf\udce9") as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with EmbeddedCacher(job) as cacher:
            assert Path(parse_address(cacher.url).path).is_relative_to(folder)
            assert_same_batches(all_batches(cacher.url, job, 1)[0], planned_batches(job, 1)[0])


def test_an_embedded_cacher_takes_its_shards_along() -> None:
    job = config()
    job = dataclasses.replace(job, cacher=dataclasses.replace(job.cacher, shards=("2",), shard_tables=("C1+C4", "C2")))
    with EmbeddedCacher(job) as cacher:
        ours = all_batches(cacher.url, job, 2, phases=("train", "eval"))
        shards = children_of(child_of(cacher))
        assert len(shards) == 2
    assert all(is_gone(pid) for pid in shards)
    for rank in range(2):
        expected = planned_batches(job, 2)[rank] + planned_batches(job, 2, "eval")[rank]
        assert_same_batches(ours[rank], expected)


def test_with_a_secret_over_tcp() -> None:
    job = config()
    secret = "made up by the job's first rank"
    with EmbeddedCacher(job, listen="0.0.0.0:0", secret=secret) as cacher:
        port = parse_address(cacher.url).port
        url = f"127.0.0.1:{port}"
        assert len(all_batches(url, job, 2, secret=secret)[1]) == 18
        with pytest.raises(InputError, match="the shared secret is missing or wrong"):
            all_batches(url, job)
        command_line = Path(f"/proc/{child_of(cacher)}/cmdline").read_bytes()
        assert secret.encode() not in command_line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "parquet", "path": "/nowhere"}, "/nowhere"),
        ({"path": "--odd name=1", "format": "criteo-tsv"}, "odd name=1"),
    ],
)
def test_data_that_cannot_be_opened_is_the_job_s_error(change: dict[str, str], message: str) -> None:
    job = config()
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, **change))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        EmbeddedCacher(job).__enter__()


def test_an_open_listener_without_a_secret_is_refused() -> None:
    with pytest.raises(InputError, match="can be reached from other machines"):
        EmbeddedCacher(config(), listen="0.0.0.0:0").__enter__()


def test_the_embedded_cacher_can_end_in_the_middle_of_a_run() -> None:
    job = config(limit=0)
    with EmbeddedCacher(job) as cacher:
        with remote(cacher.url, job) as source:
            next(source.batches("train", spec_of(job, source.schema)))
        pid = child_of(cacher)
    assert is_gone(pid)


PARENT = """
import sys, time
from bagpipe.util.temporary_folder import temporary_folder
from cacher.embedded import EmbeddedCacher
from tests.cacher.daemons import config, remote, spec_of
job = config()
with EmbeddedCacher(job) as cacher, remote(cacher.url, job) as source:
    next(source.batches("train", spec_of(job, source.schema)))
    print(cacher.pid, flush=True)
    sys.stdin.read()
"""


def test_the_embedded_cacher_dies_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        watched = os.pidfd_open(pid)
        try:
            parent.kill()
            parent.wait()
            # Readable once the process has ended.
            assert select.select([watched], [], [], 30)[0]
        finally:
            os.close(watched)


def test_the_embedded_cacher_ignores_ctrl_c() -> None:
    """Ctrl-C goes to the whole foreground process group; the cacher serves until the trainer is done."""
    job = config()
    with EmbeddedCacher(job) as cacher:
        assert os.getpgid(child_of(cacher)) != os.getpgrp()
        with remote(cacher.url, job) as source:
            rank_batches = source.batches("train", spec_of(job, source.schema))
            taken = [next(rank_batches)]
            os.kill(child_of(cacher), signal.SIGTERM)  # it still finishes the running job
            assert_same_batches(taken + list(rank_batches), planned_batches(job)[0])
