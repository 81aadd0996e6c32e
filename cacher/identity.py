"""Reads what a cacher's batches depend on besides the settings: a `BatchIdentity`, once, at the start.

    files: sizes, XXH3-64 of blocks ───────┐
    code of readers, oracle and cacher ────┴──> BatchIdentity ──Welcome──> trainer: its checkpoints, its reconnects

A trainer that resumes, or that continues in the middle of a plan after a cacher restart, compares it with its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash

import bagpipe
import data
from bagpipe.errors import InputError
from bagpipe.files.access import file_version, is_remote
from bagpipe.types.batch_identity import TAG, BatchIdentity, FileIdentity, sampled_blocks, sections

__all__ = ["identity_of"]

_OURS = Path(bagpipe.__file__).parent
_PLANNING_CODE = (
    _OURS / "oracle",
    _OURS / "client",
    _OURS / "types",
    Path(data.__file__).parent,
    Path(__file__).parent,
)

#: Bytes per read, as in `bagpipe.checkpoint.files`.
_CHUNK_BYTES = 1 << 20
#: Files read at the same time: network file systems answer slowly, but many requests at once.
_NUM_THREADS = 8


def identity_of(files: Sequence[str], layout: str, *, full: bool = False) -> BatchIdentity:
    """The identity of data and code.

    Args:
        files: all files that are read, in order.
        layout: `data.source.Source.layout`.
        full: hash all bytes; else only blocks of files that are not small (`sampled_blocks`).

    Raises:
        InputError: a file is missing, cannot be read, or gets shorter meanwhile.
    """
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cacher-identity") as pool:
        found = tuple(pool.map(lambda file: _identity_of_file(file, len(files), full=full), files))
    return BatchIdentity(code=_digest_of_code(), layout=layout, files=found)


def _identity_of_file(path: str, num_files: int, *, full: bool) -> FileIdentity:
    if is_remote(path):
        return _identity_of_object(path)
    try:
        with open(path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            blocks = sampled_blocks(num_bytes, num_files)
            is_whole = sum(map(len, blocks)) == num_bytes
            return FileIdentity(
                name=path,
                num_bytes=num_bytes,
                sampled=_digests(file, blocks),
                sections=_digests(file, sections(num_bytes)) if full and not is_whole else (),
            )
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _identity_of_object(path: str) -> FileIdentity:
    """Of a remote file: its size and its ETag, or what the store has in its place, without reading it."""
    try:
        version = file_version(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    return FileIdentity(name=path, num_bytes=version.num_bytes, sampled=(f"{TAG}{version.tag.replace(' ', '_')}",))


def _digests(file: FileIO, blocks: Iterable[range]) -> tuple[str, ...]:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    return tuple(_digest(file, block, buffer) for block in blocks)


def _digest(file: FileIO, block: range, buffer: memoryview) -> str:
    """Hexadecimal XXH3-64 of a range of bytes."""
    hasher, num_left = xxhash.xxh3_64(), len(block)
    file.seek(block.start)
    while num_left:
        count = file.readinto(buffer[:num_left])
        if not count:
            raise InputError(f"{file.name!s}: got shorter while it was read")
        hasher.update(buffer[:count])
        num_left -= count
    return hasher.hexdigest()


def _digest_of_code() -> str:
    files = (file for folder in _PLANNING_CODE for file in sorted(folder.glob("*.py")))
    lines = [np.__version__, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
