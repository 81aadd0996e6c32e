"""Temporary folders, and those that a killed process leaves behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.util.temporary_folder import MAX_SOCKET_PATH_BYTES, temporary_file, temporary_folder


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


@pytest.mark.parametrize("name", ["x" * 150, "a,b"])
def test_a_folder_of_a_socket_is_elsewhere_if_no_socket_can_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with temporary_folder("cacher", socket_name="a.sock") as folder, temporary_folder() as other:
        assert folder.parent in (Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")), Path("/tmp"), Path("/var/tmp"))
        assert other.parent == tmp_path / name
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "a.sock"))
    assert not folder.exists()


def test_a_folder_of_a_socket_is_usually_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with temporary_folder(parent=Path("/tmp")) as parent:
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        with temporary_folder(socket_name="b" * 20) as folder:
            assert folder.parent == parent
        with pytest.raises(InputError, match=r"^TMPDIR: expected a folder in which a socket's path has at most "):
            temporary_folder(socket_name="b" * MAX_SOCKET_PATH_BYTES).__enter__()


def test_a_temporary_file_is_written_and_read_and_has_no_name(tmp_path: Path) -> None:
    with temporary_file() as file:
        file.write(b"some words")
        file.seek(5)
        assert (file.read(), list(tmp_path.iterdir())) == (b"words", [])


def under_a_limit(program: str, num_bytes: int) -> str:
    """What a program prints that can write only so many bytes to each file, as on a full disk."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))"
    command = [sys.executable, "-c", program.replace("LIMIT", limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


_IMPORTS = """
import sys
from bagpipe.errors import InputError, JobError
from bagpipe.util.environment import check_environment
from bagpipe.util.temporary_folder import temporary_file, temporary_folder, temporary_place
"""


def test_without_any_folder_for_temporary_files_one_line_names_the_variable(tmp_path: Path) -> None:
    """All are full; those that are missing or read-only look the same."""
    program = f"""{_IMPORTS}
LIMIT
for make in (temporary_place, temporary_file().__enter__, temporary_folder().__enter__, check_environment):
    try:
        make()
    except InputError as error:
        print(error)
"""
    lines = under_a_limit(program, 0).splitlines()
    start = "TMPDIR: expected a folder for temporary files that can be written and has room: "
    assert [line.startswith(start) and str(tmp_path) in line for line in lines] == [True] * 4


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    program = f"""{_IMPORTS}
temporary_place()
LIMIT
try:
    with temporary_file() as file:
        file.write(bytes(100_000))
except JobError as error:
    print(error)
try:
    temporary_folder().__enter__()
except JobError as error:
    print(error)
"""
    first = under_a_limit(program, 10)
    line = f"TMPDIR: cannot write {tmp_path}: File too large; free space there, or choose another place\n"
    assert first == line * 2
    assert list(tmp_path.iterdir()) == []
