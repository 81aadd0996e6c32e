"""Resumes whose data files were touched, copied, moved, or changed: the same digests, or a line that names the file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.files import criteo_lines
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed, digests

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

DATA = ["--data.format", "criteo-tsv", "--data.schema", "", "--data.limit", "0", "--cache.rows", "5000"]


def days_in(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        (folder / f"day_{number}").write_bytes(criteo_lines(600, seed=number))
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    """A job that has trained three of its batches from ``days``; no test may change it."""
    folder = tmp_path_factory.mktemp("stopped")
    with EmbeddedServer(folder / "server") as server:
        job = Resumed(folder=folder, arguments=["--store.url", server.url, *DATA])
        done = job.run("--data.path", str(days_in(folder / "days")), "--run.steps", "3")
        assert (done.code, done.err) == (0, "")
        yield job


def touched(days: Path) -> Path:
    for file in days.iterdir():
        os.utime(file, ns=(0, 0))
    return days


def copied(days: Path) -> Path:
    copy = days.with_name("copied")
    shutil.copytree(days, copy)
    shutil.rmtree(days)
    return copy


def moved(days: Path) -> Path:
    return days.rename(days.with_name("moved"))


def test_the_same_bytes_resume(server: EmbeddedServer, tmp_path: Path) -> None:
    days = days_in(tmp_path / "days")
    done = run_forked([*JOB, *DATA, "--data.path", str(days), "--result", str(tmp_path / "whole.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *DATA])
    for change, steps in ((None, "3"), (touched, "4"), (copied, "5"), (moved, "0")):
        days = days if change is None else change(days)
        done = job.run("--data.path", str(days), "--run.steps", steps)
        assert (done.code, done.err) == (0, "")
    assert job.resumed_from() == 5
    assert digests(job.result) == digests(tmp_path / "whole.json")


def other_label(days: Path) -> None:
    """Keeps size and times."""
    path = days / "day_1"
    status, content = path.stat(), bytearray(path.read_bytes())
    place = content.index(b"\n") + 1
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def longer(days: Path) -> None:
    with (days / "day_0").open("ab") as file:
        file.write(b"\n")


def swapped(days: Path) -> None:
    (days / "day_0").rename(days / "free")
    (days / "day_1").rename(days / "day_0")
    (days / "free").rename(days / "day_1")


def another(days: Path) -> None:
    (days / "day_2").write_bytes(criteo_lines(5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_label, r"/day_1 .*has other content: the block at byte 0, of \d+ bytes, differs: use another"),
        (longer, r"/day_0 .*has (\d+) bytes, not \d+: use"),
        (swapped, r"/day_0 .*has the content that .*/day_1 had: use"),
        (another, r"it has 3 files of \d+ bytes, not 2 files of \d+ bytes: use"),
    ],
)
def test_other_bytes_are_refused(change: Callable[[Path], None], words: str, stopped: Resumed, tmp_path: Path) -> None:
    days = tmp_path / "days"
    shutil.copytree(stopped.folder / "days", days)
    change(days)
    done = stopped.run("--data.path", str(days))
    assert done.code == 2
    assert done.error_line.startswith("error: the checkpoint at step 3 was made with other data: ")
    assert re.search(words, done.error_line), done.error_line
