"""Which files of a folder are data, in which order, and what is said of the rest."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import fsspec
import pytest

from bagpipe.errors import InputError
from bagpipe.files.access import forget
from bagpipe.files.data_folder import copies, data_folder, natural_key, tell_left_out

NAMES = (
    "part-10",
    "part-2",
    "part-02",
    "000000_0",
    "dt=2026-11-27/hour=10/a",
    "dt=2026-11-27/hour=9/b",
    "dt=2026-11-27/loose/c",
    "dt=2026-11-27/_SUCCESS",
    "old/d",
    "=x/e",
    "_temporary/f",
    ".g",
)


@pytest.mark.parametrize("place", ["local", "memory"])
def test_files_are_those_of_the_folder_and_its_partitions(tmp_path: Path, place: str) -> None:
    for name in NAMES:
        if place == "memory":
            fsspec.filesystem("memory").pipe_file(f"/folder/{name}", b"x")
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
    forget("memory://")
    found = data_folder("memory://folder" if place == "memory" else str(tmp_path))
    assert found.files == (
        "dt=2026-11-27/hour=9/b",
        "dt=2026-11-27/hour=10/a",
        "part-02",
        "part-2",
        "part-10",
        "000000_0",
    )
    assert found.left_out == ("=x/", "dt=2026-11-27/loose/", "old/")
    assert found.hidden == (".g", "_temporary", "dt=2026-11-27/_SUCCESS")


def test_links_and_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "days" / "dt=1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b").write_text("x")
    (tmp_path / "days" / "a").symlink_to(tmp_path / "elsewhere" / "b")
    (tmp_path / "days" / "dt=2").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "days")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        found = data_folder(str(tmp_path / "days"))
    assert found.files == ("a", "dt=2/b")
    assert found.left_out == ("socket",)
    (tmp_path / "days" / "dt=1" / "x=1").symlink_to(tmp_path / "days")
    with pytest.raises(InputError, match=r"dt=1/x=1: expected a folder of data files, got a link to a folder that it"):
        data_folder(str(tmp_path / "days"))
    (tmp_path / "days" / "dt=1" / "x=1").unlink()
    (tmp_path / "days" / "dt=1" / "x=1").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"dt=1/x=1: expected a file, got a link to nothing$"):
        data_folder(str(tmp_path / "days"))
    with pytest.raises(InputError, match=r"cannot read .*gone: No such file"):
        data_folder(str(tmp_path / "gone"))


def test_copies_append_to_the_name_of_another_file() -> None:
    names = ["a.csv", "a.csv.bak", "a.csv~", "a.csv.gz", "a.csv.bak~", "day_1", "day_1.orig", "x/a.csv.old", "x.csv.gz"]
    parts = ["a.csv.1", "a.csv.2.gz", "a.csv.2026-11-27", "a.csv.2026-11-26.gz", "day_10", "day_1_0", "b.csv.bak"]
    assert copies([*names, *parts]) == {"a.csv.bak", "a.csv~", "a.csv.gz", "a.csv.bak~", "day_1.orig"}


def test_names_of_any_characters_are_ordered() -> None:
    names = ["day²", "day٣", "day2", "day10", os.fsdecode(b"caf\xe9")]
    assert sorted(names, key=natural_key) == [os.fsdecode(b"caf\xe9"), "day2", "day٣", "day10", "day²"]


def test_left_out_names_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tell_left_out("clicks", [], "why")
        tell_left_out("clicks", [f"x{number}" for number in range(7)], "why")
    assert caplog.messages == ["clicks: left out: x0, x1, x2, x3, x4 and 2 more (why)"]
