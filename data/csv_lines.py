"""Lines of separated text as an Arrow table, and the malformed lines among them. Parsed by `pyarrow.csv`.

    all lines ──typed columns──> table                                                  the usual case
        └──refused──> open quotes ──> all columns as texts ──> another number of values, values that are no numbers
            └──the other lines──typed columns──> table

A line is malformed exactly if the parser refuses it alone. The way through quotes and texts only finds such lines fast;
lines that it cannot explain are tried by halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from bagpipe.util.distinct_ids import distinct_ids
from data.arrow_columns import ArrowBlock
from data.csv_layout import CsvLayout, has_open_quote, split_line
from data.number_parsing import quote

__all__ = ["ID", "parse_lines"]

#: Malformed lines of a block that only trials by halves find, such as those with a quoted value of more than 128 KiB.
#: A trial takes up to a millisecond.
_MAX_TRIED = 1_000

#: Type of a column of ids, in the types to read: integers from -2^63 to 2^64 - 1. Those of 2^63 and more are read as
#: signed integers with the same bits.
ID = pa.uint64()

#: Integers of at least 2^63, and beyond.
_LONG = r"^[0-9]{19,}$"

_WORDS = {ID: "an integer", pa.int64(): "an integer", pa.float64(): "a number", pa.float32(): "a number"}

Lines = NDArray[np.int64]


def parse_lines(
    text: bytes, names: tuple[str, ...], types: Mapping[str, pa.DataType], form: CsvLayout, *, stops: bool
) -> ArrowBlock:
    """Parse whole lines.

    Args:
        text: the lines; the last one ends too.
        names: of all columns of a line.
        types: of the columns to read: binary, `ID`, int64, float32 or float64.
        form: delimiter, quotes and missing values.
        stops: explain the first malformed line, and read only the lines before it.
    """
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
    parser = _Parser(text=text, bounds=np.concatenate([[0], ends]), names=names, types=types, form=form)
    lines = np.arange(ends.size)
    strange = parser.strange_lines()
    whole = None if strange.size else parser.table(text, ends.size)
    if whole is not None:
        return ArrowBlock(table=whole, num_raw_rows=ends.size)
    found, is_all = parser.bad_lines(np.setdiff1d(lines, strange, assume_unique=True))
    bad = distinct_ids([strange, found])
    if not is_all and not stops:
        return ArrowBlock(
            table=parser.table(b"", 0),
            num_raw_rows=ends.size,
            malformed=found[:1],
            problem=f"expected at most {_MAX_TRIED} lines that are malformed in unusual ways in a block, got more",
        )
    good = lines[: bad[0]] if stops else np.setdiff1d(lines, bad, assume_unique=True)
    table = parser.table(parser.text_of(good), good.size)
    assert table is not None, "lines that are accepted one by one are refused together"
    return ArrowBlock(
        table=table,
        num_raw_rows=ends.size,
        malformed=bad[:1] if stops else bad,
        problem=parser.explain(int(bad[0])) if stops else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parser:
    """Whole lines: line i is ``text[bounds[i]:bounds[i + 1]]``."""

    text: bytes
    bounds: Lines
    names: tuple[str, ...]
    types: Mapping[str, pa.DataType]
    form: CsvLayout

    def text_of(self, lines: Lines) -> bytes:
        """The text of ascending lines."""
        if not lines.size:
            return b""
        breaks = np.flatnonzero(np.diff(lines) != 1) + 1
        cuts = [0, *breaks.tolist(), lines.size]
        ranges = [(self.bounds[lines[low]], self.bounds[lines[high - 1] + 1]) for low, high in pairwise(cuts)]
        return b"".join(self.text[low:high] for low, high in ranges)

    def table(
        self,
        text: bytes,
        num_lines: int,
        types: Mapping[str, pa.DataType] | None = None,
        handler: Callable[[Any], str] | None = None,
    ) -> pa.Table | None:
        """Lines as a table of the columns `types`; None if one is malformed.

        A line of empty values follows the text. It is missing from the result if quotes of the last line stay open.
        With a `handler`, which skips lines with another number of values, the result has as many rows fewer.
        """
        types = self.types if types is None else types
        found = self._parsed(text, num_lines, {name: _narrow(kind) for name, kind in types.items()}, handler)
        if found is not None or handler is not None or ID not in types.values():
            return found
        # Ids of 2^63 and more: slower, as texts.
        ids = [name for name, kind in types.items() if kind == ID]
        found = self._parsed(text, num_lines, {**types, **dict.fromkeys(ids, pa.binary())})
        if found is None:
            return None
        for name in ids:
            column = _long_ids(found.column(name).combine_chunks())
            if column is None:
                return None
            found = found.set_column(found.schema.get_field_index(name), name, column)
        return found

    def _parsed(
        self,
        text: bytes,
        num_lines: int,
        types: Mapping[str, pa.DataType],
        handler: Callable[[Any], str] | None = None,
    ) -> pa.Table | None:
        """See `table`; the types are Arrow's."""
        names = [name if name in types else f"#{number}" for number, name in enumerate(self.names)]
        text += (self.form.delimiter * (len(names) - 1) + "\n").encode()
        skipped = 0

        def count(row: Any) -> str:
            nonlocal skipped
            skipped += 1
            assert handler is not None, "set with the handler only"
            return handler(row)

        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(text),
                read_options=pyarrow.csv.ReadOptions(use_threads=False, column_names=names, block_size=len(text) + 1),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self.form.delimiter,
                    quote_char=self.form.quote or False,
                    ignore_empty_lines=False,
                    invalid_row_handler=count if handler is not None else None,
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=["", *self.form.null],
                    strings_can_be_null=True,
                ),
            )
        except pa.ArrowInvalid:
            return None
        num_rows = num_lines - skipped
        return table.slice(0, num_rows) if table.num_rows == num_rows + 1 else None

    def strange_lines(self) -> Lines:
        """Lines with a NUL, or a carriage return that does not end them."""
        if b"\0" not in self.text and self.text.count(b"\r") == self.text.count(b"\r\n"):
            return np.zeros(0, np.int64)
        buffer = np.frombuffer(self.text, np.uint8)
        follows = np.append(buffer[1:], 0)
        places = np.flatnonzero((buffer == 0) | ((buffer == ord("\r")) & (follows != ord("\n"))))
        return distinct_ids([np.searchsorted(self.bounds[1:], places, side="right")])

    def bad_lines(self, lines: Lines) -> tuple[Lines, bool]:
        """The malformed ones of ascending lines, and whether these are all: not if too many need trials."""
        bad = self._explained(lines)
        rest = np.setdiff1d(lines, bad, assume_unique=True)
        if self.table(self.text_of(rest), rest.size) is not None:
            return bad, True
        unexplained = _refused(rest.size, lambda low, high: self._accepts(rest[low:high]), most=_MAX_TRIED)
        return distinct_ids([bad, rest[unexplained]]), unexplained.size <= _MAX_TRIED

    def _accepts(self, lines: Lines) -> bool:
        return self.table(self.text_of(lines), lines.size) is not None

    def _explained(self, lines: Lines) -> Lines:
        """Those of ascending lines that have an open quote, another number of values, or a value that is no number."""
        short = self._short_lines(lines)
        lines = np.setdiff1d(lines, short, assume_unique=True)
        open_lines = np.zeros(0, np.int64)
        for parity in (None, 1, 0):  # an open quote is mostly the only one of its line; the rest need a longer look
            if parity is not None:
                open_lines = distinct_ids([open_lines, self._open_quotes(lines, parity)])
            closed = np.setdiff1d(lines, open_lines, assume_unique=True)
            bad_values = self._bad_values(closed)
            if bad_values is not None:
                return distinct_ids([short, open_lines, bad_values])
        return distinct_ids([short, open_lines])

    def _short_lines(self, lines: Lines) -> Lines:
        """Those of ascending lines without quotes that have another number of values: one more than delimiters.

        An empty line has as many as there should be, all of them missing.
        """
        wrong = self._counts(self.form.delimiter) != len(self.names) - 1
        text, starts = np.frombuffer(self.text, np.uint8), self.bounds[:-1]
        wrong &= (text[starts] != ord("\n")) & ((text[starts] != ord("\r")) | (np.diff(self.bounds) != 2))
        if self.form.quote:
            wrong &= self._counts(self.form.quote) == 0
        short: Lines = lines[wrong[lines]]
        return short

    def _counts(self, character: str) -> Lines:
        """Number of occurrences of a character in each line."""
        places = np.flatnonzero(np.frombuffer(self.text, np.uint8) == ord(character))
        numbers = np.searchsorted(self.bounds[1:], places, side="right")
        counts: Lines = np.bincount(numbers, minlength=self.bounds.size - 1)
        return counts

    def _open_quotes(self, lines: Lines, parity: int) -> Lines:
        """Those of ascending lines with an odd (1) or even (0) number of quotes whose last one stays open."""
        if not self.form.quote:
            return np.zeros(0, np.int64)
        counts = self._counts(self.form.quote)[lines]
        quoted = lines[(counts > 0) & (counts % 2 == parity)]
        ends = zip(self.bounds[quoted].tolist(), self.bounds[quoted + 1].tolist(), strict=True)
        found = [has_open_quote(self.text[start:end].decode("latin-1"), self.form) for start, end in ends]
        opened: Lines = quoted[np.array(found, np.bool_)]
        return opened

    def _bad_values(self, lines: Lines) -> Lines | None:
        """Lines with another number of values, or with a value that is no number; None if quotes span lines."""
        short: list[int] = []

        def skip(row: Any) -> str:
            short.append(row.number - 1)
            return "skip"

        text = self.text_of(lines).decode("latin-1").encode()  # the handler is called with UTF-8 only
        texts = self.table(text, lines.size, dict.fromkeys(self.types, pa.binary()), skip)
        if texts is None:
            return None
        regular = np.delete(lines, short)
        bad = [lines[short]]
        for name, kind in self.types.items():
            if kind != pa.binary():
                bad.append(regular[_bad_numbers(texts.column(name), kind)])
        return distinct_ids(bad)

    def explain(self, number: int) -> str:
        """The fault of a malformed line."""
        line = self.text[self.bounds[number] : self.bounds[number + 1]]
        content = line.rstrip(b"\r\n")
        for byte, name in ((b"\0", "a NUL"), (b"\r", "a carriage return")):
            if byte in content:
                return f"expected text, got {name} at byte {content.index(byte) + 1} of the line"
        columns = len(split_line(line.decode("latin-1"), self.form))
        if columns != len(self.names):
            return f"expected {len(self.names)} columns separated by {self.form.delimiter!r}, got {columns}"
        texts = self.table(line, 1, dict.fromkeys(self.types, pa.binary()))
        if texts is None:
            return "expected quotes that end in the same line, got an open one"
        for name, kind in self.types.items():
            if self.table(line, 1, {name: kind}) is None:
                return f"expected {_WORDS[kind]} in column {name!r}, got {quote(texts.column(name)[0].as_py())}"
        raise AssertionError("a malformed line passes all checks")


def _bad_numbers(column: pa.ChunkedArray, kind: pa.DataType) -> NDArray[np.bool_]:
    """Rows of a column of texts that are neither numbers nor null. Spaces around a number are no part of it."""
    encoded = column.combine_chunks().dictionary_encode()
    texts = pc.ascii_trim(encoded.dictionary.cast(pa.string()), characters=" \t")
    is_bad = np.zeros(len(texts) + 1, np.bool_)  # the last is null's
    is_bad[_refused(len(texts), lambda low, high: _is_number(texts[low:high], kind))] = True
    codes = encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    found: NDArray[np.bool_] = is_bad[codes]
    return found


def _is_number(texts: pa.Array, kind: pa.DataType) -> bool:
    """Whether all texts are numbers."""
    if kind == ID:
        return _long_ids(texts) is not None
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _narrow(kind: pa.DataType) -> pa.DataType:
    """The type as which most ids can be read."""
    return pa.int64() if kind == ID else kind


def _long_ids(texts: pa.Array) -> pa.Array | None:
    """Texts as ids, int64, nulls included; None: one is no integer from -2^63 to 2^64 - 1."""
    try:
        texts = pc.ascii_trim(texts.cast(pa.string()), characters=" \t")
        is_long = pc.match_substring_regex(texts, _LONG).fill_null(False)
        long = pc.if_else(is_long, texts, "0").cast(pa.uint64()).view(pa.int64())
        return pc.if_else(is_long, long, pc.if_else(is_long, "0", texts).cast(pa.int64()))
    except pa.ArrowInvalid:
        return None


def _refused(count: int, accepts: Callable[[int, int], bool], most: int | None = None) -> Lines:
    """The items of ``[0, count)`` that are refused alone, if a range is accepted just when all its items are.

    Ascending; at most one more than `most`.
    """
    found: list[int] = []
    waiting = [(0, count)] if count else []
    while waiting and (most is None or len(found) <= most):
        low, high = waiting.pop()
        if accepts(low, high):
            continue
        if high == low + 1:
            found.append(low)
        else:
            middle = (low + high) // 2
            waiting += [(middle, high), (low, middle)]
    return np.array(found, np.int64)
