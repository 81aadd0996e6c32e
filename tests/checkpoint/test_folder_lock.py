"""The lock of a job's folder, between processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.folder_lock import FolderLock, holder
from bagpipe.errors import FencedError

pytestmark = pytest.mark.multiproc

#: Starts a generation, has a child process, says its number, and waits.
_START = """
import subprocess, sys
from pathlib import Path
from bagpipe.checkpoint.folder import CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]))
generation = folder.new_generation()
if sys.argv[2] == "noted":
    folder.note_start(generation, "token", None)
child = subprocess.Popen(["sleep", "1000"], close_fds=False)
print(generation, child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def running(path: Path, start: str = "noted") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has started on the folder, and its generation. Its child outlives it."""
    command = [sys.executable, "-c", _START, str(path), start]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        generation, child = map(int, process.stdout.readline().split())
        try:
            yield process, generation
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_a_running_job_is_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.holder() == ""
    with running(folder.path) as (process, generation):
        assert folder.holder() == f"process {process.pid} on host {socket.gethostname()}"
        assert folder.holder(before=generation) == ""
        process.send_signal(signal.SIGSTOP)
        assert folder.holder()
        process.kill()
        process.wait()
        # Not even while a child of the dead job lives.
        assert folder.holder() == ""


def test_two_starts_at_once_see_each_other(tmp_path: Path) -> None:
    """The later number sees the earlier one, whichever of them looks first."""
    folder = CheckpointFolder(tmp_path)
    with running(tmp_path, "not noted") as (process, earlier):
        later = folder.new_generation()
        assert later == earlier + 1
        assert f"process {process.pid} " in folder.holder(before=later)
        folder.abandon(later)
        assert folder.new_generation() == later


def test_a_job_notices_that_a_later_one_has_started(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    generation = folder.new_generation()
    folder.note_start(generation, "token", None)
    with running(tmp_path, "not noted"):
        folder.check_newest(generation)
    with running(tmp_path) as (_, later), pytest.raises(FencedError, match=f"start {later} of the job runs on it"):
        folder.check_newest(generation)


def test_a_lock_is_released_once(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.release()
    lock.release()
    assert holder(tmp_path) == ""
    assert holder(tmp_path / "missing") == ""
