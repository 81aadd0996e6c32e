from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.errors import InputError, JobError
from bagpipe.util.outputs import cannot_write, check_folder, check_writable, new_folder, write_json, written_whole


def test_paths_are_checked_before_the_work(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "out.json"), "--result")
    check_folder(str(tmp_path / "new" / "deeper"), "run.dir")
    with pytest.raises(InputError, match=r"--result: folder .* does not exist"):
        check_writable(str(tmp_path / "gone" / "out.json"), "--result")
    with pytest.raises(InputError, match="--result: cannot write"):
        check_writable(str(tmp_path), "--result")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="--result: expected a file"):
        check_writable(str(tmp_path / "pipe"), "--result")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run.dir: expected a folder"):
        check_folder(str(tmp_path / "file"), "run.dir")


def test_json_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(str(path), [1])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(str(path), float("nan"))
    assert json.loads(path.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "out.json"
    (taken / "full").mkdir(parents=True)
    with pytest.raises(JobError, match=r"cannot write .*out\.json: Is a directory"):
        write_json(str(taken), [1])
    assert list(tmp_path.iterdir()) == [taken]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "out.json")
    write_json(str(link), [1])
    assert link.is_symlink()
    assert json.loads((tmp_path / "out.json").read_text()) == [1]


def test_a_full_disk_is_a_failure_and_not_bad_input() -> None:
    full = cannot_write("out", OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(full, JobError)
    assert str(full) == "cannot write out: No space left on device; free space there, or choose another place"
    without_number = OSError("I/O error: No space left on device (os error 28)")
    assert str(cannot_write("out", without_number)) == str(full)
    denied = cannot_write("out", PermissionError(errno.EACCES, "Permission denied"), key="--out")
    assert isinstance(denied, InputError)
    assert str(denied) == "--out: cannot write out: Permission denied"


def test_a_new_folder_gets_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be the working directory; folders whose names begin alike stay; an error leaves nothing."""
    here, beside = tmp_path / "here", tmp_path / "here.tmp"
    here.mkdir()
    beside.mkdir()
    monkeypatch.chdir(here)
    with new_folder(Path(), "--out") as folder:
        (folder / "file").write_text("1")
        assert not list(here.iterdir())
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["file"]
    with pytest.raises(InputError, match=r"--out .*/here is not empty"), new_folder(here, "--out"):
        raise AssertionError
    with pytest.raises(ValueError, match="inside"), new_folder(tmp_path / "new", "--out"):
        raise ValueError("inside")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out: cannot write .*: Not a directory"):
        with new_folder(tmp_path / "file" / "out", "--out"):
            raise AssertionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "here", "here.tmp"]


def test_folders_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    """Not those of a living one, of other names, or without a lock's holder that can be known."""
    program = (
        "import os, signal, sys; from pathlib import Path; from bagpipe.util.outputs import new_folder\n"
        "with new_folder(Path(sys.argv[1]), '--out') as folder:\n"
        "    (folder / 'file').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out, beside = tmp_path / "out", tmp_path / "out.of-mine.tmp"
    beside.mkdir()
    done = subprocess.run([sys.executable, "-c", program, str(out)], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path != beside)
    (tmp_path / "out.0123abcd.tmp").symlink_to(beside)
    with new_folder(out, "--out") as first:
        assert not left.exists()
        with new_folder(out, "--out"):
            assert first.exists(), "the folder of a living process"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.0123abcd.tmp", "out.of-mine.tmp"]


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with written_whole(str(path)) as partial:
        Path(partial).write_text("first")
        assert not path.exists()
    with pytest.raises(InputError, match="out: No such file or directory"), written_whole(str(path)) as partial:
        os.unlink(f"{partial}.other")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("first", [path])
    with (
        pytest.raises(InputError, match=rf"^cannot write {path}/x: Not a directory$"),
        written_whole(f"{path}/x") as partial,
    ):
        Path(partial).touch()  # its removal fails, too
