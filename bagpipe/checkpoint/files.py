"""Files of a checkpoint: written, made durable, named with length and checksum; checked before a byte of them is used.

    write ──fsync──> finish ──FileEntry──> manifest            manifest ──FileEntry──> check ──same──> read

Errors of the file system while writing are left as the `OSError` they are: the caller knows what could not be saved.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import xxhash

from bagpipe.checkpoint.manifest import BrokenCheckpoint, FileEntry

__all__ = ["check", "finish", "link_or_copy", "read_small", "sync_folder", "write_whole"]

#: Read at a time: large enough that a call costs nothing, small enough for a processor's cache.
_CHUNK_BYTES = 1 << 20

#: Manifests and parts: bytes read at most, whatever lies there.
_MAX_SMALL_BYTES = 256 << 20


def finish(path: Path) -> FileEntry:
    """Make a written file durable and describe it: fsync, length, XXH3-128 of what can be read back."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    num_bytes, digest = _digest(path)
    return FileEntry(name=path.name, num_bytes=num_bytes, xxh3_128=digest)


def check(folder: Path, entry: FileEntry) -> None:
    """Raise `BrokenCheckpoint` unless the file is what was written: names the file, and what differs."""
    path = folder / entry.name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            raise BrokenCheckpoint(f"{path}: expected {entry.num_bytes} bytes, got {num_bytes}")
        digest = _digest(path)[1]
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    if digest != entry.xxh3_128:
        raise BrokenCheckpoint(f"{path}: expected XXH3-128 {entry.xxh3_128}, got {digest}")


def write_whole(path: Path, content: bytes) -> None:
    """Put a small file in place at once: after a crash there is the old one, or the new one, or none."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)


def read_small(path: Path) -> bytes:
    """A manifest's or part's bytes. Raises `BrokenCheckpoint` if they cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_SMALL_BYTES + 1)
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_SMALL_BYTES:
        raise BrokenCheckpoint(f"{path}: expected at most {_MAX_SMALL_BYTES} bytes")
    return content


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or a second copy where the file system has no hard links. Replaces `target`."""
    beside = target.with_name(target.name + ".tmp")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
    # A rename onto another name of the same file does nothing and leaves both.
    beside.replace(target)
    beside.unlink(missing_ok=True)


def _digest(path: Path) -> tuple[int, str]:
    hasher = xxhash.xxh3_128()
    num_bytes = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
    return num_bytes, hasher.hexdigest()
