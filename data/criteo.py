"""Criteo's click logs: label, 13 integers, 26 hexadecimal ids, tab-separated, empty = missing.

    text ──positions of tabs and line ends──> [40, lines] field ends and widths ──data.number_parsing──> numbers

One pass without a loop over rows. Lines that fail a check are set aside; `explain_line` then checks the first of them
byte by byte to build the message. CRLF line ends fail too: the last id would end in a carriage return, and a file that
a Windows tool has rewritten needs a look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema
from bagpipe.util.distinct_ids import distinct_ids
from data.columns import Columns
from data.hashing import place_ids, range_reason
from data.number_parsing import Positions, digit_words, parse_hex, parse_integers, quote
from data.schema_file import criteo_schema
from data.source import Block, Segment
from data.text_files import (
    BLOCK_BYTES,
    TextSource,
    list_files,
    locate_line,
    read_text,
    segments_of_files,
)

__all__ = ["NUM_COLUMNS", "CriteoSource", "explain_line", "transform_dense"]

NUM_DENSE = 13
NUM_SPARSE = 26
NUM_COLUMNS = 1 + NUM_DENSE + NUM_SPARSE

#: Lines parsed at once: temporaries of 40 fields x 1,024 lines x 8 B stay in a core's second-level cache.
_CHUNK_LINES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CriteoSource(TextSource):
    """Criteo-format text: a file, a .gz, or a folder of days.

    Attributes:
        files: paths in reading order.
        schema: Criteo's columns; tables can be hashed or bounded.
        bad_rows: stop or skip.
        block_bytes: approximate text in a block.
    """

    files: tuple[str, ...]
    schema: DataSchema = field(default_factory=criteo_schema)
    bad_rows: str = "stop"
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def at(cls, path: str, **options: object) -> CriteoSource:
        """The source of a file or folder. InputError when there is none."""
        return cls(files=list_files(path), **options)  # type: ignore[arg-type]

    @property
    def layout(self) -> str:
        return f"criteo-tsv/{self.block_bytes}"

    def segments(self) -> tuple[Segment, ...]:
        return segments_of_files(self.files, self.block_bytes)

    def read(self, block: Block) -> Columns:
        text = read_text(block)
        parsed = parse_lines(text)
        values, bad = self._apply_tables(parsed)
        bad_lines = distinct_ids([parsed.bad_lines, bad])
        if bad_lines.size and self.bad_rows == "stop":
            raise self._error(block, text, int(bad_lines[0]))
        labels, dense, present = parsed.labels, parsed.dense, parsed.present
        if bad.size:
            keep = np.ones(labels.shape[0], np.bool_)
            keep[np.searchsorted(parsed.lines, bad)] = False
            labels, dense, present, values = labels[keep], dense[keep], present[:, keep], values[:, keep]
        return Columns(
            labels=labels,
            dense=transform_dense(dense),
            values=values[present],
            lengths=present.astype(np.int32),
            weights=None,
            num_raw_rows=parsed.num_lines,
            bad_rows=bad_lines,
        )

    def _apply_tables(self, parsed: ParsedLines) -> tuple[Positions, Positions]:
        """Ids hashed where the table says so, and the lines with an id outside its table."""
        bad = []
        for number, feature in enumerate(self.schema.features):
            table = self.schema.table(feature.table)
            parsed.ids[number], outside = place_ids(parsed.ids[number], table, parsed.present[number])
            if outside.size:
                bad.append(parsed.lines[outside])
        return parsed.ids, distinct_ids(bad) if bad else np.zeros(0, np.int64)

    def _error(self, block: Block, text: bytes, line: int) -> InputError:
        content = text.split(b"\n", line + 1)[line]
        reason = explain_line(content) or self._explain_range(content)
        return InputError(f"{locate_line(block, line)}: {reason}")

    def _explain_range(self, content: bytes) -> str:
        for feature, text in zip(self.schema.features, content.split(b"\t")[1 + NUM_DENSE :], strict=True):
            table = self.schema.table(feature.table)
            ids = np.array([int(text or b"0", 16)], np.uint64).view(np.int64)
            if text and place_ids(ids, table)[1].size:
                return f"{range_reason(table, int(ids[0]))} ({text.decode()})"
        raise AssertionError("a bad line passes all checks")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParsedLines:
    """The n good lines of a text.

    Attributes:
        num_lines: number of all lines.
        lines: int64 ``[n]`` ascending positions (from 0) of the good lines.
        bad_lines: int64, positions of the others.
        labels: float32 ``[n]``.
        dense: int64 ``[n, 13]``, 0 if missing.
        ids: int64 ``[26, n]``, undefined if missing.
        present: bool ``[26, n]``.
    """

    num_lines: int
    lines: Positions
    bad_lines: Positions
    labels: NDArray[np.float32]
    dense: Positions
    ids: Positions
    present: NDArray[np.bool_]


def transform_dense(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """``log(1 + max(x, 0))``, in float64, rounded to float32."""
    clipped = np.maximum(counts, 0).astype(np.float64)
    return np.log1p(clipped, out=clipped).astype(np.float32)


def parse_lines(text: bytes) -> ParsedLines:
    """Parse whole lines. Skips and lists the lines that are not Criteo's."""
    buffer = np.frombuffer(text, np.uint8)
    separators = np.flatnonzero(buffer <= 10)  # tab and LF; a NUL or another control character makes the line bad
    ends = separators[buffer[separators] == 10]
    num_lines = ends.shape[0]
    lines = np.arange(num_lines, dtype=np.int64)
    last_separators = separators[NUM_COLUMNS - 1 :: NUM_COLUMNS]
    if separators.shape[0] != NUM_COLUMNS * num_lines or not np.array_equal(last_separators, ends):
        line_of = np.searchsorted(ends, separators)
        well_formed = np.bincount(line_of, minlength=num_lines) == NUM_COLUMNS
        separators, lines = separators[well_formed[line_of]], lines[well_formed]
    starts_of_lines = np.concatenate([[0], ends[:-1] + 1])[lines]
    n = lines.shape[0]
    words = digit_words(text)
    labels = np.empty(n, np.float32)
    dense = np.empty((n, NUM_DENSE), np.int64)
    ids = np.empty((NUM_SPARSE, n), np.int64)
    present = np.empty((NUM_SPARSE, n), np.bool_)
    bad = np.zeros(n, np.bool_)
    fields = separators.reshape(n, NUM_COLUMNS)
    # A control character other than tab where a separator belongs.
    if np.count_nonzero(buffer[separators] == 9) != n * (NUM_COLUMNS - 1):
        bad |= (buffer[fields[:, :-1]] != 9).any(axis=1)
    for low in range(0, n, _CHUNK_LINES):
        part = slice(low, low + _CHUNK_LINES)
        ends_of = np.ascontiguousarray(fields[part].T)
        starts_of = np.empty_like(ends_of)
        starts_of[0] = starts_of_lines[part]
        starts_of[1:] = ends_of[:-1] + 1
        widths = ends_of - starts_of
        numbers, wrong = parse_integers(words, ends_of[:14], widths[:14])
        wrong[0] |= (numbers[0] > 1) | (widths[0] != 1) | (numbers[0] < 0)
        labels[part] = numbers[0]
        dense[part] = numbers[1:].T
        bad[part] |= wrong.any(axis=0)
        ids[:, part], wrong = parse_hex(words, ends_of[14:], widths[14:])
        present[:, part] = widths[14:] > 0
        bad[part] |= wrong.any(axis=0)
    if bad.any():
        good = ~bad
        lines, labels, dense = lines[good], labels[good], dense[good]
        ids, present = ids[:, good], present[:, good]
    bad_lines = np.setdiff1d(np.arange(num_lines), lines, assume_unique=True) if lines.size < num_lines else lines[:0]
    return ParsedLines(
        num_lines=num_lines, lines=lines, bad_lines=bad_lines, labels=labels, dense=dense, ids=ids, present=present
    )


_INTEGER = re.compile(rb"-?[0-9]{1,16}\Z")
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}\Z")


def explain_line(line: bytes) -> str | None:
    """Explain what is wrong with a line (without its line end), or return None: the parser's rules for one line."""
    if b"\0" in line:
        return f"expected text, got a NUL byte at column {line.index(0) + 1} of the line"
    if line.endswith(b"\r"):
        return "expected the line to end in LF, got CRLF line ends: convert the file (for example with dos2unix)"
    columns = line.split(b"\t")
    if len(columns) != NUM_COLUMNS:
        return f"expected {NUM_COLUMNS} tab-separated columns, got {len(columns)}"
    if columns[0] not in (b"0", b"1"):
        return f"expected label 0 or 1 in column 1, got {quote(columns[0])}"
    for number, text in enumerate(columns[1:], start=1):
        name = f"I{number}" if number <= NUM_DENSE else f"C{number - NUM_DENSE}"
        pattern, kind = (_INTEGER, "an integer") if number <= NUM_DENSE else (_HEX, "a hexadecimal id")
        if text and not pattern.match(text):
            return f"expected {kind} of up to 16 digits in {name} (column {number + 1}), got {quote(text)}"
    return None
