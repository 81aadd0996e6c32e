"""Text of the commands: files that flags name, written whole, and tables with aligned columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bagpipe.util.outputs import cannot_write

__all__ = ["aligned", "write_text"]


def write_text(flag: str, path: str, text: str) -> None:
    """Write the file that a flag names.

    Raises:
        InputError: it cannot be written.
        JobError: the disk is full.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error, key=flag) from None


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, each column as wide as its widest cell. Rows are of one length, and there is at least one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
