"""RESP encoders and decoders for batches of fixed-width rows, vectorised with numpy. No sockets.

    request   *{2+n} HMGET key  then n fields   `$12 | table id`              one strided record array, filled by column
              *{2+2n} HSET key  then n pairs    `$12 | table id | $W | row check`
    reply     *{n}              then n values   `$W | row check`  or  `$-1`   (HMGET)
              :{created}                                                      (HSET)

Below, a row is the whole value, including its check word; only `RowEncoder` distinguishes the two.

A reply in which every row was found is a strided view of the buffer. With missing rows, the offsets of the `$-1`
markers give the start of every record. This guess is verified header by header from the front, so it equals the result
of a sequential parser. Row bytes that look like a marker make the guess fail; the reply is then parsed run by run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.keys import FIELD_BYTES
from bagpipe.store.redis.remedies import with_remedy
from bagpipe.store.row_checksum import CHECK_BYTES, check_words

__all__ = [
    "ErrorReply",
    "FieldEncoder",
    "HmgetDecoder",
    "HmgetReply",
    "RowEncoder",
    "decode_hset",
    "decode_ok",
    "hmget_header",
    "hset_header",
]

Bytes = NDArray[np.uint8]
Voids = NDArray[np.void]

_MISSING = b"$-1\r\n"
_CRLF = b"\r\n"
_OK = b"+OK\r\n"
#: Longest accepted error line; servers truncate theirs far earlier.
_MAX_LINE_BYTES = 64 * 1024


class ErrorReply(StoreError):
    """An error reply of the server.

    Attributes:
        line: its text, without the leading minus.
        start: offset of the line.
        end: offset after it.
    """

    def __init__(self, line: str, start: int, end: int) -> None:
        super().__init__(f"the store answered an error: {with_remedy(line)}")
        self.line = line
        self.start = start
        self.end = end


def hmget_header(key: bytes, num_rows: int) -> bytes:
    """Header of an HMGET of `num_rows` rows."""
    return b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n" % (num_rows + 2, len(key), key)


def hset_header(key: bytes, num_rows: int) -> bytes:
    """Header of an HSET of `num_rows` rows."""
    return b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (2 * num_rows + 2, len(key), key)


class FieldEncoder:
    """Encodes the fields of an HMGET. Constant bytes stay in a scratch array between calls."""

    def __init__(self) -> None:
        self._dtype = np.dtype([("head", "S5"), ("table", ">u4"), ("id", ">i8"), ("tail", "S2")])
        self._scratch = np.empty(0, self._dtype)

    @property
    def record_bytes(self) -> int:
        """Bytes of one encoded field."""
        return self._dtype.itemsize

    def encode(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> Bytes:
        """Encoded fields, uint8 ``[n * record_bytes]``. The array is overwritten by the next call."""
        num_rows = len(ids)
        if num_rows > len(self._scratch):
            self._scratch = np.empty(num_rows, self._dtype)
            self._scratch["head"] = b"$%d\r\n" % FIELD_BYTES
            self._scratch["tail"] = _CRLF
        records = self._scratch[:num_rows]
        records["table"] = tables
        records["id"] = ids
        return records.view(np.uint8)


class RowEncoder:
    """Encodes (field, value) pairs of an HSET for rows of one width. The constant bytes stay in a scratch array."""

    def __init__(self, row_bytes: int) -> None:
        middle = b"\r\n$%d\r\n" % (row_bytes + CHECK_BYTES)
        self._constants = {"head": b"$%d\r\n" % FIELD_BYTES, "middle": middle, "tail": _CRLF}
        self._dtype = np.dtype(
            [
                ("head", "S5"),
                ("table", ">u4"),
                ("id", ">i8"),
                ("middle", f"S{len(middle)}"),
                ("row", f"V{row_bytes}"),
                ("check", "<u8"),
                ("tail", "S2"),
            ]
        )
        self._scratch = np.empty(0, self._dtype)

    @property
    def record_bytes(self) -> int:
        """Bytes of one encoded pair."""
        return self._dtype.itemsize

    def encode(
        self, tables: NDArray[np.uint32], ids: NDArray[np.int64], rows: Voids, checks: NDArray[np.uint64]
    ) -> Bytes:
        """Encoded pairs, uint8 ``[n * record_bytes]``; overwritten by the next call.

        Args:
            tables: table numbers ``[n]``.
            ids: ids ``[n]``.
            rows: ``[n]``, contiguous, one void element of `row_bytes` each.
            checks: uint64 ``[n]``, filled with the check words of the rows.
        """
        num_rows = len(ids)
        if num_rows > len(self._scratch):
            self._scratch = np.empty(num_rows, self._dtype)
            for name, constant in self._constants.items():
                self._scratch[name] = constant
        records = self._scratch[:num_rows]
        records["table"] = tables
        records["id"] = ids
        records["row"] = rows
        records["check"] = checks[:] = check_words(tables, ids, rows)
        return records.view(np.uint8)


class HmgetReply(NamedTuple):
    """One decoded HMGET reply.

    Attributes:
        end: offset of the first byte after the reply.
        rows: ``[number found]`` of the decoder's dtype, in field order; a view of the buffer or a copy.
        found: bool ``[n]``; None if every row was found.
    """

    end: int
    rows: Voids
    found: NDArray[np.bool_] | None


class HmgetDecoder:
    """Decodes HMGET replies whose rows have one dtype, as laid out in the reply."""

    def __init__(self, row_dtype: np.dtype[np.void]) -> None:
        self._row_dtype = row_dtype
        row_bytes = self.row_bytes = row_dtype.itemsize
        self.row_header = b"$%d\r\n" % row_bytes
        self.record_bytes = len(self.row_header) + row_bytes + 2
        # A row header is compared together with the preceding CR LF: at least 6 bytes, so two overlapping 4- or 8-byte
        # words cover it.
        self._boundary = _CRLF + self.row_header
        word_bytes = 8 if len(self._boundary) >= 8 else 4
        self._word = np.dtype(f"<u{word_bytes}")
        last = len(self._boundary) - word_bytes
        self._word_checks = tuple(
            (offset, int.from_bytes(self._boundary[offset : offset + word_bytes], "little"))
            for offset in dict.fromkeys((0, min(last, word_bytes), last))
        )

    def max_reply_bytes(self, num_rows: int) -> int:
        """Length of a reply in which every row is found."""
        return len(b"*%d\r\n" % num_rows) + num_rows * self.record_bytes

    def decode(self, buffer: Bytes, start: int, end: int, num_rows: int) -> HmgetReply | None:
        """Decode the reply at `start`; None while ``buffer[start:end]`` is incomplete.

        Raises:
            StoreError: an error reply (with the server's text), or an unexpected reply.
        """
        header = b"*%d\r\n" % num_rows
        body = start + len(header)
        if buffer[start : min(body, end)].tobytes() != header:
            if header.startswith(buffer[start:end].tobytes()):
                return None
            _refuse(buffer, start, end, header)
            return None
        arrived = min(num_rows, (end - body) // self.record_bytes)
        if self._all_found(buffer, body, arrived):
            next_record = body + arrived * self.record_bytes
            first_row = body + len(self.row_header)
            if arrived == num_rows:
                return HmgetReply(
                    next_record, _strided(buffer, self._row_dtype, first_row, num_rows, self.record_bytes), None
                )
            if self.row_header.startswith(buffer[next_record : min(next_record + len(self.row_header), end)].tobytes()):
                return None
        starts = self._starts_by_markers(buffer, body, end, num_rows)
        if starts is None or not self._verified(buffer, starts, end):
            starts = self._starts_by_runs(buffer, body, end, num_rows)
        return None if starts is None or starts.end > end else self._gather(buffer, starts)

    def _all_found(self, buffer: Bytes, body: int, num_rows: int) -> bool:
        """Whether each of the `num_rows` complete records from `body` on holds a row."""
        for offset, word in self._word_checks:
            words = _strided(buffer, self._word, body - 2 + offset, num_rows, self.record_bytes)
            if np.count_nonzero(words == word) != num_rows:
                return False
        last = body + num_rows * self.record_bytes
        return buffer[last - 2 : last].tobytes() == _CRLF

    def _starts_by_markers(self, buffer: Bytes, body: int, end: int, num_rows: int) -> _Starts | None:
        """Unverified record starts, derived from the offsets of the missing-row markers; None if inconsistent."""
        markers = _find_markers(buffer, body, end)
        # If all earlier markers are real, marker k follows k missing rows and a whole number of found rows.
        number = np.arange(len(markers))
        found_before, remainder = np.divmod(markers - body - number * len(_MISSING), self.record_bytes)
        inside = found_before + number < num_rows
        if remainder[inside].any():
            return None
        missing_rows = (found_before + number)[inside]
        lengths = np.full(num_rows, self.record_bytes, np.int64)
        lengths[missing_rows] = len(_MISSING)
        ends = body + np.cumsum(lengths)
        found = np.ones(num_rows, np.bool_)
        found[missing_rows] = False
        return _Starts(starts=ends - lengths, found=found, end=int(ends[-1]))

    def _verified(self, buffer: Bytes, guess: _Starts, end: int) -> bool:
        """Whether every found record that has arrived starts with its header and ends with CR LF.

        Missing records are markers by construction, so a verified guess equals the result of a sequential parser.
        """
        starts = guess.starts[guess.found]
        last = guess.starts[np.searchsorted(guess.starts, end) - 1]  # the record that contains `end`, or the last one
        if last + len(self.row_header) > end and not self._may_grow(buffer[last:end].tobytes(), int(last), end):
            return False
        begun = starts[starts + len(self.row_header) <= end]
        anywhere = _strided(buffer, self._word, 0, len(buffer) - self._word.itemsize + 1, 1)
        for offset, word in self._word_checks:
            if not (anywhere[begun - 2 + offset] == word).all():
                return False
        ends = starts[starts + self.record_bytes <= end] + self.record_bytes
        return bool((buffer[ends - 2] == _CRLF[0]).all() and (buffer[ends - 1] == _CRLF[1]).all())

    def _starts_by_runs(self, buffer: Bytes, body: int, end: int, num_rows: int) -> _Starts | None:
        """Record starts, by walking runs of found rows; None while the reply is incomplete.

        Raises:
            StoreError: a record starts with neither a row header nor the missing-row marker.
        """
        starts, found = np.empty(num_rows, np.int64), np.zeros(num_rows, np.bool_)
        row, position = 0, body
        while row < num_rows:
            run = self._found_run(buffer, position, min(num_rows - row, (end - position) // self.record_bytes))
            starts[row : row + run] = position + np.arange(run) * self.record_bytes
            found[row : row + run] = True
            row, position = row + run, position + run * self.record_bytes
            if row == num_rows:
                break
            here = buffer[position : min(position + len(self._boundary), end)].tobytes()
            if here.startswith(_MISSING):
                starts[row] = position
                row, position = row + 1, position + len(_MISSING)
            elif self._may_grow(here, position, end):
                return None
            else:
                _refuse(buffer, position, end, self.row_header)
                return None
        return _Starts(starts=starts, found=found, end=position)

    def _found_run(self, buffer: Bytes, position: int, limit: int) -> int:
        """Number of complete consecutive found records from `position`, at most `limit`."""
        good = np.ones(limit, np.bool_)
        for offset, word in self._word_checks:
            good &= _strided(buffer, self._word, position - 2 + offset, limit, self.record_bytes) == word
        for offset, byte in ((self.record_bytes - 2, _CRLF[0]), (self.record_bytes - 1, _CRLF[1])):
            good &= _strided(buffer, np.dtype(np.uint8), position + offset, limit, self.record_bytes) == byte
        return limit if good.all() else int(good.argmin())

    def _may_grow(self, here: bytes, position: int, end: int) -> bool:
        """Whether the bytes at `position` are an incomplete record."""
        head = here[: len(self.row_header)]
        if len(head) < len(self.row_header) and self.row_header.startswith(head):
            return True
        if _MISSING.startswith(here):
            return True
        return head == self.row_header and end < position + self.record_bytes

    def _gather(self, buffer: Bytes, starts: _Starts) -> HmgetReply:
        anywhere = _strided(buffer, self._row_dtype, 0, max(len(buffer) - self.row_bytes + 1, 0), 1)
        return HmgetReply(starts.end, anywhere[starts.starts[starts.found] + len(self.row_header)], starts.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starts:
    """Offsets of all records of a reply, a mask of those with a row, and the end of the reply."""

    starts: NDArray[np.int64]
    found: NDArray[np.bool_]
    end: int


def decode_hset(buffer: Bytes, start: int, end: int, num_rows: int) -> int | None:
    """Offset after the HSET reply at `start`; None while it is incomplete.

    Raises:
        StoreError: an error reply (with the server's text), or not a count between 0 and `num_rows`.
    """
    line = buffer[start : min(start + 24, end)].tobytes()
    text, separator, _ = line.partition(_CRLF)
    if text.startswith(b":") and text[1:].isdigit() and separator and int(text[1:]) <= num_rows:
        return start + len(text) + 2
    if not line or (line.startswith(b":") and len(line) < 24 and not separator):
        return None
    _refuse(buffer, start, end, b":0..%d\r\n" % num_rows)
    return None


def decode_ok(buffer: Bytes, start: int, end: int) -> int | None:
    """Offset after the reply `+OK` at `start`; None while it is incomplete.

    Raises:
        StoreError: any other reply.
    """
    line = buffer[start : min(start + len(_OK), end)].tobytes()
    if line == _OK:
        return start + len(_OK)
    if not _OK.startswith(line):
        _refuse(buffer, start, end, _OK)
    return None


def _refuse(buffer: Bytes, start: int, end: int, expected: bytes) -> None:
    """Raise for the unexpected bytes at `start`. Returns if they are an incomplete error line."""
    line, separator, _ = buffer[start : min(start + _MAX_LINE_BYTES, end)].tobytes().partition(_CRLF)
    if line.startswith(b"-"):
        if separator:
            raise ErrorReply(line[1:].decode(errors="replace"), start, start + len(line) + len(_CRLF))
        if len(line) < _MAX_LINE_BYTES:
            return
    raise StoreError(f"the store answered {line[:40]!r}, expected {expected!r}")


def _find_markers(buffer: Bytes, start: int, end: int) -> NDArray[np.int64]:
    """Offsets of all `$-1 CR LF` in ``buffer[start:end]``, ascending."""
    marker_bytes = len(_MISSING)
    positions = np.flatnonzero(buffer[start : max(end - marker_bytes + 1, start)] == _MISSING[0]) + start
    for offset in range(1, marker_bytes):
        positions = positions[buffer[positions + offset] == _MISSING[offset]]
    return positions


def _strided(buffer: Bytes, dtype: np.dtype[Any], offset: int, count: int, stride: int) -> NDArray[Any]:
    """`count` elements of `dtype` every `stride` bytes; elements can overlap and be unaligned."""
    return np.ndarray((max(count, 0),), dtype, buffer, offset if count > 0 else 0, (stride,))
