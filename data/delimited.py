"""Lines of separated columns: the common part of the avazu and movielens readers.

    first line ──> DelimitedFile: positions of the wanted columns    text ──split_fields──> Fields [columns, lines]
    Fields ──number_parsing──> ids, labels, bad lines ──place_ids──> ids of tables, problems ──good_columns──> Columns

A format is a list of `Column`s, each with a `Kind`: the values that the parser accepts and their name in errors. Bad
lines are set aside; `explain_line` then checks the first of them field by field to build the message. LF and CRLF both
end a line. Quotes have no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema
from data.columns import Columns, take_rows
from data.hashing import place_ids, range_reason
from data.number_parsing import Positions, Words, byte_words, digit_words, parse_hex, parse_integers, quote
from data.source import Block
from data.text_files import locate_line

__all__ = [
    "Column",
    "DelimitedFile",
    "Fields",
    "Kind",
    "Problem",
    "explain_line",
    "find_columns",
    "good_columns",
    "split_fields",
]

#: Lines parsed at once: temporaries of about 12 fields x 4,096 lines x 8 B stay in a core's second-level cache.
_CHUNK_LINES = 4096

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Values of a column: `words` completes "expected …", `pattern` matches a whole field, `test` checks it further."""

    words: str
    pattern: re.Pattern[bytes]
    test: Callable[[bytes], bool] = lambda text: True

    def fits(self, text: bytes) -> bool:
        return self.pattern.fullmatch(text) is not None and self.test(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column that a format reads. An empty field is a missing value unless the column is `required`."""

    name: str
    kind: Kind
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DelimitedFile:
    """One file: its number of columns, and the positions (from 0) of the columns its format reads, in its order."""

    path: str
    num_columns: int
    positions: tuple[int, ...]


def find_columns(path: str, line: bytes, separator: str, columns: Sequence[Column]) -> DelimitedFile:
    """Find the wanted columns by name in a header line, in any order and among others.

    Raises:
        InputError: a name is missing or appears twice.
    """
    text = line.decode("utf-8-sig", "backslashreplace").rstrip("\r\n")
    names = [name.strip().strip('"') for name in text.split(separator)]
    positions = []
    for column in columns:
        if names.count(column.name) != 1:
            shown = text if len(text) <= 120 else text[:120] + "…"
            found = "none" if column.name not in names else "several"
            raise InputError(f"{path}:1: expected a header with a column {column.name!r}, got {found} in {shown!r}")
        positions.append(names.index(column.name))
    return DelimitedFile(path=path, num_columns=len(names), positions=tuple(positions))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fields:
    """The n well-formed lines of a text: those with the right number of columns and without NUL.

    Attributes:
        text: all lines.
        num_lines: number of all lines.
        lines: int64 ``[n]``, ascending positions (from 0) of the well-formed lines.
        ends, widths: int64 ``[num_columns, n]``: end of each field in the text, and its bytes.
        words: from `data.number_parsing.digit_words`.
    """

    text: bytes
    num_lines: int
    lines: Positions
    ends: Positions
    widths: Positions
    words: Words

    def integers(self, positions: Sequence[int]) -> tuple[Positions, Flags]:
        """Decimal columns: int64 ``[columns, n]`` (0 if empty), and flags of the lines that hold anything else."""
        return self._numbers(parse_integers, positions)

    def hexadecimals(self, positions: Sequence[int]) -> tuple[Positions, Flags]:
        """Hexadecimal columns; otherwise as `integers`."""
        return self._numbers(parse_hex, positions)

    def _numbers(
        self, parse: Callable[[Words, Positions, Positions], tuple[Positions, Flags]], positions: Sequence[int]
    ) -> tuple[Positions, Flags]:
        picked, n = np.array(positions, np.int64), self.lines.shape[0]
        values, wrong = np.empty((picked.size, n), np.int64), np.empty(n, np.bool_)
        for low in range(0, n, _CHUNK_LINES):
            part = slice(low, low + _CHUNK_LINES)
            ends, widths = self.ends[:, part][picked], self.widths[:, part][picked]
            values[:, part], flags = parse(self.words, ends, widths)
            flags.any(axis=0, out=wrong[part])
        return values, wrong

    def present(self, positions: Sequence[int]) -> Flags:
        """Bool ``[columns, n]``: fields that are not empty."""
        there: Flags = self.widths[np.array(positions, np.int64)] > 0
        return there

    def distinct(self, position: int, value: Callable[[bytes], float | None]) -> tuple[NDArray[np.float64], Flags]:
        """Map a column with few distinct texts by `value`, called once per distinct text; None marks a bad field.

        Returns:
            float64 ``[n]``, and flags of bad lines: those, and fields of more than 8 bytes.
        """
        ends, widths = self.ends[position], self.widths[position]
        words = byte_words(self.text, ends, widths)
        known = np.unique(words)
        values = [value(int(word).to_bytes(8, "little").lstrip(b"\0")) for word in known]
        table = np.array([np.nan if number is None else number for number in values], np.float64)
        found = table[np.searchsorted(known, words)] if known.size else np.zeros(0)
        return found, np.isnan(found) | (widths > 8)


def split_fields(text: bytes, separator: bytes, num_columns: int) -> Fields:
    """Find the fields of whole lines; `separator` is one byte."""
    buffer = np.frombuffer(text, np.uint8)
    breaks = np.flatnonzero((buffer == ord(separator)) | (buffer == ord("\n")))
    line_ends = breaks[buffer[breaks] == ord("\n")]
    num_lines = line_ends.shape[0]
    lines = np.arange(num_lines, dtype=np.int64)
    regular = breaks.shape[0] == num_columns * num_lines and np.array_equal(
        breaks[num_columns - 1 :: num_columns], line_ends
    )
    if not regular or b"\0" in text:
        line_of = np.searchsorted(line_ends, breaks)
        good = np.bincount(line_of, minlength=num_lines) == num_columns
        good[np.searchsorted(line_ends, np.flatnonzero(buffer == 0))] = False
        breaks, lines = breaks[good[line_of]], lines[good]
    ends = np.ascontiguousarray(breaks.reshape(lines.shape[0], num_columns).T)
    starts = np.empty_like(ends)
    starts[0] = np.concatenate([[0], line_ends[:-1] + 1])[lines]
    starts[1:] = ends[:-1] + 1
    last = ends[-1]
    last -= (last > starts[-1]) & (buffer[last - 1] == ord("\r"))
    return Fields(text=text, num_lines=num_lines, lines=lines, ends=ends, widths=ends - starts, words=digit_words(text))


def explain_line(line: bytes, separator: bytes, file: DelimitedFile, columns: Sequence[Column]) -> str | None:
    """Explain what is wrong with a line (without its LF), or return None: the parser's rules, one field at a time."""
    if b"\0" in line:
        return f"expected text, got a NUL at byte {line.index(0) + 1} of the line"
    fields = line.removesuffix(b"\r").split(separator)
    if len(fields) != file.num_columns:
        return f"expected {file.num_columns} columns separated by {separator.decode()!r}, got {len(fields)}"
    for column, position in zip(columns, file.positions, strict=True):
        text = fields[position]
        if (text or column.required) and not column.kind.fits(text):
            return f"expected {column.kind.words} in {column.name} (column {position + 1}), got {quote(text)}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Bad lines among n: int64 ascending positions, and the explanation for the first of them."""

    lines: Positions
    reason: str


def good_columns(
    fields: Fields,
    *,
    schema: DataSchema,
    labels: NDArray[np.float32],
    ids: Positions,
    present: Flags,
    wrong: Flags,
    bags: Sequence[tuple[Positions, NDArray[np.int32]]] = (),
    error: Callable[[bytes], str | None] | None,
    block: Block,
    times_s: Positions | None = None,
) -> Columns:
    """The columns of a block without its bad rows.

    Args:
        fields: the n well-formed lines of the block.
        schema: its first features are those of `ids`, the rest those of `bags`.
        labels: float32 ``[n]``.
        ids, present: ``[features, n]``, before mapping to tables.
        wrong: bool ``[n]``: lines with a field of the wrong kind.
        bags: values, before mapping to tables, and lengths of multi-hot features; in range unless hashed.
        error: explains a line; None: bad rows are skipped.
        block: source of the lines, for errors.
        times_s: int64 ``[n]``, times in seconds since 1970 UTC; None: they are not read.

    Raises:
        InputError: a bad row, unless bad rows are skipped.
    """
    problems = []
    for number in range(ids.shape[0]):
        table = schema.table(schema.features[number].table)
        ids[number], outside = place_ids(ids[number], table, present[number] & ~wrong)
        if outside.size:
            problems.append(Problem(lines=outside, reason=range_reason(table, int(ids[number, outside[0]]))))
    several = [
        place_ids(values, schema.table(feature.table))[0]
        for feature, (values, _) in zip(schema.features[ids.shape[0] :], bags, strict=True)
    ]
    lengths = np.concatenate([present.astype(np.int32), *(counts[None] for _, counts in bags)])
    wrong = wrong.copy()
    for problem in problems:
        wrong[problem.lines] = True
    good = np.flatnonzero(~wrong)
    bad = np.setdiff1d(np.arange(fields.num_lines), fields.lines[good], assume_unique=True)
    if bad.size and error is not None:
        line = int(bad[0])
        content = fields.text.split(b"\n", line + 1)[line]
        row = int(np.searchsorted(fields.lines, line))
        reason = error(content) or next(problem.reason for problem in problems if problem.lines[0] == row)
        raise InputError(f"{locate_line(block, line)}: {reason}")
    columns = Columns(
        labels=labels,
        dense=np.zeros((labels.shape[0], len(schema.dense)), np.float32),
        values=np.concatenate([ids[present], *several]),
        lengths=lengths,
        weights=None,
        num_raw_rows=fields.num_lines,
        bad_rows=bad,
        times_s=times_s,
    )
    return take_rows(columns, good) if good.size < labels.size else columns
