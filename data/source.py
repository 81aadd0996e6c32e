"""`Source`: the interface of a reader. A source has ordered segments, a segment has ordered blocks.

    source.segments() ──> Segment ──source.blocks(segment)──> Block ──source.read(block)──> Columns
    cheap, no full scan   random access                       in order, discovered lazily   pure, in any process

A *raw row* is one line of text or one stored row, malformed ones included; positions, limits and splits count raw rows.
Sources are frozen records of paths and options, so they can be sent to worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from bagpipe.errors import InputError
from bagpipe.files.access import file_version
from bagpipe.files.version import FileVersion
from bagpipe.types.schema import DataSchema
from data.columns import Columns

__all__ = [
    "BAD_ROWS",
    "Block",
    "FileVersion",
    "Segment",
    "Source",
    "check_bad_rows",
    "file_version",
    "version_of",
]

#: Treatment of a malformed row: stop the job with its file and line, or skip and count it.
BAD_ROWS = ("stop", "skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the data that can be opened without reading the parts before it.

    Attributes:
        file: path, or the name of generated data.
        start, stop: bytes of a plain text file, row group numbers, or synthetic row numbers; of a gzip file the lines
            of its header (0 or 1), and 0.
        num_rows: raw rows; None if only a scan can count them.
    """

    file: str
    start: int
    stop: int
    num_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The unit that `read` turns into columns.

    Attributes:
        file: path, or the name of generated data.
        start, stop: as in `Segment`, or row numbers within a row group.
        num_rows: raw rows; None if only reading can count them.
        group: row group (parquet), else 0.
        line: 1-based number of the first line if known, else 0.
        epoch: of a source whose columns differ between epochs (`ParquetSource.reads_by_epoch`); else 0.
        payload: the text itself if the file cannot be read from the middle (.gz), else None.
    """

    file: str
    start: int
    stop: int
    num_rows: int | None = None
    group: int = 0
    line: int = 0
    epoch: int = 0
    payload: bytes | None = None


class Source(Protocol):
    """A data set that is read block by block.

    Attributes:
        files: paths of all files read; empty for generated data.
        schema: its columns.
        in_processes: `read` holds the interpreter lock, so that worker processes pay off; otherwise a thread reads.
        multi_hot: features whose bags can hold more than one id.
        bad_rows: treatment of malformed rows, one of `BAD_ROWS`.
        layout: name of the rule that decides where blocks begin; a saved position is valid only for the same layout.
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
    def bad_rows(self) -> str: ...

    @property
    def layout(self) -> str: ...

    def segments(self) -> tuple[Segment, ...]:
        """All segments in order, without a scan of the data.

        Raises:
            InputError: a file is missing, empty, or not of this format.
        """
        ...

    def blocks(self, segment: Segment) -> Iterator[Block]:
        """The blocks of a segment in order; holds at most one at a time.

        Raises:
            InputError: the rest of the file cannot be read (a truncated or corrupt .gz).
        """
        ...

    def read(self, block: Block) -> Columns:
        """Parse one block. A pure function of the source and the block.

        Raises:
            InputError: a bad row under the stop policy: file, line, what was expected, what came.
        """
        ...

    def locate(self, block: Block, row: int) -> str:
        """The place of a raw row of a block, for a message: file and line, or file and row. Can scan the file.

        Args:
            row: from 0, in the block.
        """
        ...

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        """Raw rows of a segment. Can scan the segment, and can stop counting at `at_most`."""
        ...


def version_of(path: str) -> FileVersion:
    """The version of a data file.

    Raises:
        InputError: it does not exist or cannot be reached.
    """
    try:
        return file_version(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def check_bad_rows(policy: str) -> str:
    """`policy` if it is one of `BAD_ROWS`; InputError otherwise."""
    if policy not in BAD_ROWS:
        raise InputError(f"data.bad_rows must be one of {', '.join(BAD_ROWS)}, got {policy!r}")
    return policy
