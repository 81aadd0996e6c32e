from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.files import remote
from bagpipe.files.transfer import copy, files_below, get_bytes, get_file, put_bytes, put_file, remove
from tests.files.s3_server import Proxy


def test_there_and_back(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    put_file(tmp_path / "a", f"{bucket}/x/a")
    copy(f"{bucket}/x/a", f"{bucket}/x/deep/b")
    put_bytes(b"small", f"{bucket}/x/c")
    assert sorted(files_below(f"{bucket}/x")) == ["a", "c", "deep/b"]
    get_file(f"{bucket}/x/deep/b", tmp_path / "b")
    assert ((tmp_path / "b").read_bytes(), get_bytes(f"{bucket}/x/c")) == (b"content", b"small")
    remove(f"{bucket}/x/a")
    remove(f"{bucket}/x/a")
    assert sorted(files_below(f"{bucket}/x")) == ["c", "deep/b"]
    assert files_below(f"{bucket}/none") == []
    with pytest.raises(FileNotFoundError):
        copy(f"{bucket}/none", f"{bucket}/d")
    with pytest.raises(FileNotFoundError):
        get_file(f"{bucket}/none", tmp_path / "d")


def test_faults_cost_time_alone(bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    faults = ["500", "", "cut"]
    proxy.faults = lambda number, method, path: faults[number % 3]
    (tmp_path / "a").write_bytes(bytes(100_000))
    put_file(tmp_path / "a", f"{bucket}/a")
    get_file(f"{bucket}/a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == bytes(100_000)
    assert proxy.injected
