"""Lines of separated columns: what the readers of such formats share.

    first line ──> DelimitedFile: where the wanted columns lie      text ──split_fields──> Fields [columns, lines]
    Fields ──data.digits──> ids, labels, wrong lines ──place_ids──> ids of tables, problems ──good_columns──> Columns

A format is a list of `Column`s, each with a `Kind`: what the parser accepts and how an error names it. Lines that fail
are set apart, and one of them is looked at again, alone, to say what is wrong (`explain_line`). LF and CRLF both end a
line. Quotes have no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Table
from data.columns import Columns, take_rows
from data.hashing import first_out_of_range, hash_ids
from data.number_parsing import Positions, Words, byte_words, digit_words, parse_hex, parse_integers, quote
from data.source import Block
from data.text_files import line_number

__all__ = [
    "Column",
    "DelimitedFile",
    "Fields",
    "Kind",
    "Problem",
    "explain_line",
    "find_columns",
    "good_columns",
    "place_ids",
    "split_fields",
]

#: Lines parsed at once: temporaries of some 12 fields x 4,096 lines x 8 B stay in a core's second-level cache.
_CHUNK_LINES = 4096

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a column holds: `words` completes "expected …", `pattern` matches a whole field, `test` looks further."""

    words: str
    pattern: re.Pattern[bytes]
    test: Callable[[bytes], bool] = lambda text: True

    def fits(self, text: bytes) -> bool:
        return self.pattern.fullmatch(text) is not None and self.test(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column that a format reads; where it is not `required`, an empty field is a missing value."""

    name: str
    kind: Kind
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DelimitedFile:
    """One file: its columns, and the position (from 0) of each column that its format reads, in the format's order."""

    path: str
    num_columns: int
    positions: tuple[int, ...]


def find_columns(path: str, line: bytes, separator: str, columns: Sequence[Column]) -> DelimitedFile:
    """The wanted columns by the names in a header line, in any order and among others.

    Raises:
        InputError: a name that is missing or there twice.
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
    """The n well-formed lines of a text: those with the right number of columns and no NUL.

    Attributes:
        text: all lines.
        num_lines: all of them.
        lines: int64 ``[n]``, ascending positions (from 0) of the well-formed ones.
        ends, widths: int64 ``[num_columns, n]``: where each field ends, and its bytes.
        words: of `data.number_parsing.digit_words`.
    """

    text: bytes
    num_lines: int
    lines: Positions
    ends: Positions
    widths: Positions
    words: Words

    def integers(self, positions: Sequence[int]) -> tuple[Positions, Flags]:
        """Decimal columns: int64 ``[columns, n]`` (0 where empty), and which lines hold something else."""
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
        """Bool ``[columns, n]``: which fields are not empty."""
        there: Flags = self.widths[np.array(positions, np.int64)] > 0
        return there

    def distinct(self, position: int, value: Callable[[bytes], float | None]) -> tuple[NDArray[np.float64], Flags]:
        """A column with few distinct texts: `value` of each (called once per distinct text); None is wrong.

        Returns:
            float64 ``[n]``, and which lines are wrong: those, and fields of more than 8 bytes.
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
    """What is wrong with a line (without its LF), or None: the rules of the parser, one field at a time."""
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
    """Something wrong with some of n lines: int64 ascending positions among them, and what it is of the first one."""

    lines: Positions
    reason: str


def place_ids(table: Table, ids: Positions, present: Flags) -> tuple[Positions, Problem | None]:
    """The ids of one feature, int64 ``[n]``, as rows of its table: hashed if it says so, else checked against it."""
    if table.hash and table.rows is not None:
        return hash_ids(ids, table.rows), None
    if table.rows is None or first_out_of_range(ids[present], table) is None:
        return ids, None
    outside = np.flatnonzero(present & ((ids < 0) | (ids >= table.rows)))
    reason = f"expected ids of table {table.name!r} in [0, {table.rows}), got {ids[outside[0]]}"
    return ids, Problem(lines=outside, reason=reason)


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
) -> Columns:
    """The columns of a block, its bad rows left out.

    Args:
        fields: its n well-formed lines.
        schema: the first features are those of `ids`, the rest those of `bags`.
        labels: float32 ``[n]``.
        ids, present: ``[features, n]``, before tables are applied.
        wrong: bool ``[n]``: lines that are not what their columns must hold.
        bags: values, before tables are applied, and lengths of features with several ids; in range, unless hashed.
        error: explains a line; None: bad rows are skipped.
        block: where the lines are from, for errors.

    Raises:
        InputError: a bad row, unless they are skipped.
    """
    problems = []
    for number in range(ids.shape[0]):
        table = schema.table(schema.features[number].table)
        ids[number], problem = place_ids(table, ids[number], present[number] & ~wrong)
        if problem is not None:
            problems.append(problem)
    several = [
        place_ids(schema.table(feature.table), values, np.ones(values.shape, np.bool_))[0]
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
        raise InputError(f"{block.file}:{line_number(block) + line}: {reason}")
    columns = Columns(
        labels=labels,
        dense=np.zeros((labels.shape[0], len(schema.dense)), np.float32),
        values=np.concatenate([ids[present], *several]),
        lengths=lengths,
        weights=None,
        num_raw_rows=fields.num_lines,
        bad_rows=bad,
    )
    return take_rows(columns, good) if good.size < labels.size else columns
