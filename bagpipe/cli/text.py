"""Text of the commands: files that flags name, read and written whole, and tables with aligned columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bagpipe.errors import InputError

__all__ = ["aligned", "read_text", "write_text"]


def read_text(flag: str, path: str) -> str:
    """The text of the file that a flag names.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{flag}: cannot read {path}: {error}") from None


def write_text(flag: str, path: str, text: str) -> None:
    """Write the file that a flag names.

    Raises:
        InputError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag}: cannot write {path}: {error}") from None


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, each column as wide as its widest cell. Rows are of one length, and there is at least one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
