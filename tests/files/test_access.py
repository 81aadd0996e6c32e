from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from bagpipe.files.access import (
    file_version,
    forget,
    is_file,
    is_folder,
    is_remote,
    join,
    list_folder,
    open_file,
    pin,
    pins,
)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The path of a folder with the files a and b, and a folder deep."""
    (tmp_path / "deep").mkdir()
    for name in ("a", "b", "deep/c"):
        (tmp_path / name).write_text(name)
    if request.param == "local":
        return str(tmp_path)
    system = fsspec.filesystem("memory")
    for name in ("a", "b", "deep/c"):
        system.pipe_file(f"/days/{name}", name.encode())
    forget("memory://")
    return "memory://days"


def test_files_and_folders(folder: str) -> None:
    assert [is_file(join(folder, name)) for name in ("a", "deep", "none")] == [True, False, False]
    assert [is_folder(name) for name in (folder, join(folder, "deep"), join(folder, "a"))] == [True, True, False]
    assert list_folder(folder) == {"a": "file", "b": "file", "deep": "folder"}
    with open_file(join(folder, "deep/c")) as stream:
        assert stream.read() == b"deep/c"
    with pytest.raises(FileNotFoundError):
        open_file(join(folder, "none"))


def test_versions(folder: str) -> None:
    path = join(folder, "a")
    before = file_version(path)
    assert before == file_version(path)
    assert before.num_bytes == 1
    assert str(before).startswith("1 bytes, etag " if is_remote(path) else "1 bytes, modified at ")
    if is_remote(path):
        fsspec.filesystem("memory").pipe_file("/days/a", b"x")
        assert file_version(path) == before, "a process stays with what it has seen"
        forget(folder)
    else:
        Path(path).write_text("xyz")
    assert file_version(path) != before


def test_versions_for_another_process(folder: str) -> None:
    path = join(folder, "a")
    version = file_version(path)
    assert pins([path, "elsewhere"]) == ({path: version} if is_remote(path) else {})
    forget(folder)
    pin({path: version})
    assert file_version(path) == version
