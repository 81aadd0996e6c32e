"""What a reader is: an ordered sequence of segments, each an ordered sequence of blocks, each read as one `Columns`.

    source.segments() ──> Segment ──source.blocks(segment)──> Block ──source.read(block)──> Columns
    cheap, no full scan   random access                       in order, discovered lazily   pure, in any process

A *raw row* is one line of text (or one stored row), malformed ones included; positions, limits and splits count raw
rows. Sources are frozen records of paths and options, so they travel to worker processes as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema

__all__ = [
    "BAD_ROWS",
    "Block",
    "Columns",
    "FileVersion",
    "Segment",
    "Source",
    "check_bad_rows",
    "empty_columns",
    "file_version",
    "num_rows",
]

#: What to do with a malformed row: stop the job with its file and line, or leave it out and count it.
BAD_ROWS = ("stop", "skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """Tells a file from what was there before under the same name; a clock alone may tick too slowly for that."""

    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


def file_version(path: str) -> FileVersion:
    """The version of the file as it is now. Raises OSError if it is not there."""
    status = os.stat(path)
    return FileVersion(
        inode=status.st_ino,
        num_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the data that can be opened without reading what comes before it.

    Attributes:
        file: path, or a made-up name for data that has none.
        start, stop: bytes of a plain text file, row group numbers, or synthetic row numbers; of a .gz file the lines of
            its header (0 or 1), and 0.
        num_rows: raw rows, or None when only a scan can tell.
    """

    file: str
    start: int
    stop: int
    num_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one `read` turns into columns.

    Attributes:
        file: path, or a made-up name.
        start, stop: meaning as for `Segment`, or row numbers within a row group.
        num_rows: raw rows, or None when only reading can tell.
        group: row group (parquet), else 0.
        line: 1-based number of the first line when known, else 0.
        payload: the text itself where the file cannot be read from the middle (.gz), else None.
    """

    file: str
    start: int
    stop: int
    num_rows: int | None = None
    group: int = 0
    line: int = 0
    payload: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The good rows of a block, laid out like a `Batch`.

    Attributes:
        labels: float32 ``[n]``.
        dense: float32 ``[n, num_dense]``.
        values: int64 ``[num_occurrences]``, key-major as in `Batch`.
        lengths: int32 ``[num_features, n]``.
        weights: float32 ``[num_occurrences]``, or None when no feature is weighted.
        num_raw_rows: rows of the block, bad ones included.
        bad_rows: int64 ``[num_raw_rows - n]``, ascending positions of the bad rows in the block.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None
    num_raw_rows: int
    bad_rows: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return int(self.labels.shape[0])


class Source(Protocol):
    """A data set that can be read block by block.

    Attributes:
        files: paths of all that is read, none of data that is made up.
        schema: its columns.
        in_processes: `read` is worth a worker process (it holds the interpreter lock); otherwise a thread will do.
        multi_hot: features whose bags may hold more than one id.
        layout: names whatever decides where blocks begin, so that a saved position is not applied to other blocks.
    """

    @property
    def files(self) -> tuple[str, ...]: ...

    @property
    def schema(self) -> DataSchema: ...

    @property
    def in_processes(self) -> bool: ...

    @property
    def multi_hot(self) -> frozenset[str]: ...

    @property
    def layout(self) -> str: ...

    def segments(self) -> tuple[Segment, ...]:
        """All segments in order, without a scan of the data.

        Raises:
            InputError: a file is missing, empty, or not of this format.
        """
        ...

    def blocks(self, segment: Segment) -> Iterator[Block]:
        """The blocks of a segment in order; at most one is held at a time.

        Raises:
            InputError: the file cannot be read further (a cut or corrupt .gz).
        """
        ...

    def read(self, block: Block) -> Columns:
        """Parse one block. A pure function of the source and the block.

        Raises:
            InputError: a bad row, when the policy is stop: file, line, what was expected, what came.
        """
        ...

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        """Raw rows of a segment; may scan it, and may stop counting once there are `at_most`."""
        ...


def num_rows(source: Source, at_most: int | None = None) -> int:
    """Raw rows of a source (or `at_most`, if there are more); scans text files."""
    total = 0
    for segment in source.segments():
        if at_most is not None and total >= at_most:
            break
        total += source.count_rows(segment, None if at_most is None else at_most - total)
    return total if at_most is None else min(total, at_most)


def check_bad_rows(policy: str) -> str:
    """`policy` if it is one of `BAD_ROWS`; InputError otherwise."""
    if policy not in BAD_ROWS:
        raise InputError(f"data.bad_rows must be one of {', '.join(BAD_ROWS)}, got {policy!r}")
    return policy


def empty_columns(schema: DataSchema, bad: int) -> Columns:
    """Columns of a block of `bad` rows, none of them good."""
    weighted = any(feature.weighted for feature in schema.features)
    return Columns(
        labels=np.zeros(0, np.float32),
        dense=np.zeros((0, len(schema.dense)), np.float32),
        values=np.zeros(0, np.int64),
        lengths=np.zeros((len(schema.features), 0), np.int32),
        weights=np.zeros(0, np.float32) if weighted else None,
        num_raw_rows=bad,
        bad_rows=np.arange(bad, dtype=np.int64),
    )
