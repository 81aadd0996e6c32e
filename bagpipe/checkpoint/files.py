"""Durable checkpoint files with length and checksum. A file is verified before its content is used.

    write ──fsync──> finish ──FileEntry──> manifest            manifest ──FileEntry──> check ──equal──> read

Write errors stay `OSError`: the caller adds the context.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from bagpipe.checkpoint.manifest import BrokenCheckpoint, FileEntry

__all__ = ["check", "create_plain", "finish", "link_or_copy", "open_plain", "read_small", "sync_folder", "write_whole"]

#: Bytes per read: large enough to amortize the system call, small enough for the CPU cache.
_CHUNK_BYTES = 1 << 20

#: Size limit of manifests and parts.
_MAX_SMALL_BYTES = 256 << 20


def open_plain(path: Path) -> FileIO:
    """Open a regular file to read, unbuffered. Who can write into a folder could place a link or a pipe there.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "expected a file, got a symbolic link", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def create_plain(path: Path, *, buffer_bytes: int = -1) -> BinaryIO:
    """Create a file to write, in place of what is there: a file that others link to, or a link, stays as it is.

    Args:
        path: of the file.
        buffer_bytes: see `open`.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return open(descriptor, "wb", buffering=buffer_bytes)


def finish(path: Path) -> FileEntry:
    """Make a written file durable and describe it: fsync, length, XXH3-128 of the content as read back."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    num_bytes, digest = _digest(path)
    return FileEntry(name=path.name, num_bytes=num_bytes, xxh3_128=digest)


def check(folder: Path, entry: FileEntry) -> None:
    """Raise `BrokenCheckpoint`, naming the file and the difference, unless length and checksum match."""
    path = folder / entry.name
    try:
        num_bytes, digest = _digest(path, entry.num_bytes)
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    if num_bytes != entry.num_bytes:
        raise BrokenCheckpoint(f"{path}: expected {entry.num_bytes} bytes, got {num_bytes}")
    if digest != entry.xxh3_128:
        raise BrokenCheckpoint(f"{path}: expected XXH3-128 {entry.xxh3_128}, got {digest}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file atomically: after a crash the old file, the new file or no file exists."""
    temporary = path.with_name(path.name + ".tmp")
    with create_plain(temporary) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def read_small(path: Path) -> bytes:
    """Content of a manifest or part. Raises `BrokenCheckpoint` if it cannot be read."""
    try:
        with io.BufferedReader(open_plain(path)) as file:
            content = file.read(_MAX_SMALL_BYTES + 1)
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_SMALL_BYTES:
        raise BrokenCheckpoint(f"{path}: expected at most {_MAX_SMALL_BYTES} bytes, got more")
    return content


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links. Replaces `target`."""
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    # POSIX rename onto a hard link of the same file is a no-op and keeps both names.
    temporary.replace(target)
    temporary.unlink(missing_ok=True)


def _digest(path: Path, expected_bytes: int | None = None) -> tuple[int, str]:
    """Length and checksum; of a file of another length than expected the length alone."""
    hasher = xxhash.xxh3_128()
    num_bytes = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if expected_bytes not in (None, size):
            return size, ""
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
    return num_bytes, hasher.hexdigest()
