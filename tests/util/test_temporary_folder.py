"""Temporary folders, and those that a killed process leaves behind."""

from __future__ import annotations

import errno
import fcntl
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bagpipe.util.temporary_folder import temporary_folder


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_private_and_removed(tmp_path: Path) -> None:
    with temporary_folder() as first, temporary_folder("cacher") as second:
        (first / "file").write_text("x")
        assert {first.parent, second.parent} == {tmp_path}
        assert second.name.startswith("bagpipe-cacher-")
        assert {stat.S_IMODE(path.stat().st_mode) for path in (first, second)} == {0o700}
    assert list(tmp_path.iterdir()) == []


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal; from bagpipe.util.temporary_folder import temporary_folder\n"
        "with temporary_folder('replay') as folder:\n"
        "    (folder / 'file').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with temporary_folder() as folder:
        assert not left.exists()
        with temporary_folder():
            assert folder.exists(), "the folder of a living process"


def test_folders_of_other_hosts_stay(tmp_path: Path) -> None:
    """Their processes' locks may not be seen here."""
    there = tmp_path / "bagpipe-there"
    there.mkdir()
    (there / "owner.lock").write_text("another start of another host")
    with temporary_folder():
        assert there.exists()


def test_a_lock_file_of_any_bytes_is_passed_over(tmp_path: Path) -> None:
    there = tmp_path / "bagpipe-there"
    there.mkdir()
    (there / "owner.lock").write_bytes(b"\xff\xfe")
    with temporary_folder():
        assert there.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder() as first, temporary_folder() as second:
        assert first.exists()
        assert second.exists()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_stay(tmp_path: Path) -> None:
    without_lock = tmp_path / "bagpipe-mine"
    without_lock.mkdir()
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "owner.lock").touch()
    (tmp_path / "bagpipe-link").symlink_to(target)
    (tmp_path / "bagpipe-file").touch()
    with temporary_folder():
        pass
    assert without_lock.exists()
    assert (target / "owner.lock").exists()
    assert (tmp_path / "bagpipe-file").exists()
