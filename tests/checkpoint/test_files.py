from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save

from bagpipe.checkpoint import dense_state, files
from bagpipe.checkpoint.manifest import BrokenCheckpoint


def test_a_file_is_described_by_length_and_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(bytes(range(256)) * 8192)
    entry = files.finish(path)
    assert (entry.name, entry.num_bytes) == ("x.npy", 1 << 21)
    assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(path.read_bytes())
    files.check(tmp_path, entry)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b"abcx"), "expected XXH3-128"),
        (lambda path: path.write_bytes(b"abc"), "expected 4 bytes, got 3"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "got something else"),
        (lambda path: (path.rename(path.with_name("y")), path.symlink_to("y")), "got a symbolic link"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "got something else"),
    ],
)
def test_a_changed_file_is_broken(tmp_path: Path, damage, said: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(b"abcd")
    entry = files.finish(path)
    damage(path)
    with pytest.raises(BrokenCheckpoint, match=said) as caught:
        files.check(tmp_path, entry)
    assert str(path) in str(caught.value)


def test_a_small_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    for text in (b"one", b"two"):
        files.write_whole(path, text)
        assert files.read_small(path) == text
    assert [found.name for found in tmp_path.iterdir()] == ["manifest.json"]
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        files.read_small(tmp_path / "none")


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_files_elsewhere_are_not_written_through_links(tmp_path: Path, make) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("manifest.json.tmp", "rows.npy"):
        make(tmp_path / name, victim)
    files.write_whole(tmp_path / "manifest.json", b"{}")
    with files.create_plain(tmp_path / "rows.npy") as file:
        file.write(b"rows")
    assert victim.read_bytes() == b"precious"
    assert (tmp_path / "rows.npy").read_bytes() == b"rows"
    assert not (tmp_path / "manifest.json").is_symlink()


def test_a_dense_file_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As safetensors 0.5 does, which opens what is there."""

    def write_in_place(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(save(tensors, metadata))

    monkeypatch.setattr(dense_state, "save_file", write_in_place)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "dense.safetensors").symlink_to(victim)
    dense_state.save_tensors({"a": torch.ones(2)}, tmp_path / "dense.safetensors", {})
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "dense.safetensors").is_symlink()


def test_a_pipe_does_not_hold_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "best.json.tmp")
    files.write_whole(tmp_path / "best.json", b"{}")
    assert files.read_small(tmp_path / "best.json") == b"{}"


def test_a_small_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_SMALL_BYTES", 3)
    (tmp_path / "part").write_bytes(b"abc")
    assert files.read_small(tmp_path / "part") == b"abc"
    (tmp_path / "part").write_bytes(b"abcd")
    with pytest.raises(BrokenCheckpoint, match="expected at most 3 bytes, got more"):
        files.read_small(tmp_path / "part")


def test_a_link_shares_the_file_and_replaces_what_is_there(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"rows")
    target.write_bytes(b"old")
    for _ in range(2):  # the second time both names are the same file already
        files.link_or_copy(source, target)
        assert source.samefile(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(FileNotFoundError):
        files.link_or_copy(tmp_path / "none", target)


def test_without_hard_links_the_file_is_copied(tmp_path: Path) -> None:
    """Two file systems cannot share a file."""
    source, target = tmp_path / "a", Path("/dev/shm") / f"bagpipe-{os.getpid()}"
    if source.parent.stat().st_dev == target.parent.stat().st_dev:
        pytest.skip("one file system only")
    source.write_bytes(b"rows")
    try:
        files.link_or_copy(source, target)
        assert target.read_bytes() == b"rows"
    finally:
        target.unlink(missing_ok=True)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_only_regular_files_are_opened(tmp_path: Path, make) -> None:
    """A pipe would wait for a writer, a link lead out of the folder."""
    (tmp_path / "elsewhere").write_bytes(b"x")
    make(tmp_path / "part")
    with pytest.raises(BrokenCheckpoint, match="part: cannot be read: expected a file, got"):
        files.read_small(tmp_path / "part")
