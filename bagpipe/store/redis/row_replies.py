"""HMGET replies of a run of commands, decoded part by part while they arrive. Vectorised over all commands. No sockets.

    *{n}  then n values   `$W | row check`  or  `$-1`      one such reply per command, back to back

`RowFormat` computes where every record would start if each row were found. While that holds, a part of any length is
one gather of whole records. Each missing row moves all later records forward by the same number of bytes, so the k-th
`$-1` marker names its row: its offset plus k times that number must be the start of a row. Every header and line end is
compared, so the result equals that of a sequential parser. Row bytes that look like a marker break the rule; such a
part is parsed record by record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.redis.resp_rows import Bytes, ErrorReply, refuse_reply

__all__ = ["Part", "RowFormat", "RowReplies"]

_MISSING = b"$-1\r\n"
_CRLF = b"\r\n"
_ERROR = ord("-")
_CRLF_WORD = int.from_bytes(_CRLF, "little")
#: What follows a marker's first byte, as a little-endian word.
_MARKER_END = int.from_bytes(_MISSING[1:], "little")
_WORD_BYTES = 8
_FULL = (1 << 64) - 1


class RowFormat:
    """Encoding of found rows of one width.

    Args:
        value: dtype of a value, with fields ``row`` and ``check``.

    Attributes:
        header: bytes before a value.
        record: dtype of a whole record: ``head``, the first 8 bytes; ``row``; ``check``; ``tail``, CR LF as a word.
    """

    def __init__(self, value: np.dtype[np.void]) -> None:
        self.header = b"$%d\r\n" % value.itemsize
        at = len(self.header)
        row, check = value["row"], value["check"]
        self.record = np.dtype(
            {
                "names": ["head", "row", "check", "tail"],
                "formats": ["<u8", row, check, "<u2"],
                "offsets": [0, at, at + row.itemsize, at + value.itemsize],
            }
        )
        self.record_bytes = self.record.itemsize
        self._head, self._head_mask = _masked_word(self.header[:_WORD_BYTES])
        self._more = np.frombuffer(self.header[_WORD_BYTES:], np.uint8)  # of rows of a million bytes

    def max_reply_bytes(self, num_rows: int) -> int:
        """Length of a command's reply in which every row is found."""
        return len(b"*%d\r\n" % num_rows) + num_rows * self.record_bytes

    def all_found(self, records: NDArray[np.void]) -> bool:
        """Whether each of these records is a found row's."""
        if not ((records["head"] & self._head_mask) == self._head).all() or (records["tail"] != _CRLF_WORD).any():
            return False
        if not self._more.size:
            return True
        each = records.view(np.uint8).reshape(len(records), self.record_bytes)
        return bool((each[:, _WORD_BYTES : len(self.header)] == self._more).all())


class Part(NamedTuple):
    """Some consecutive rows of a run.

    Attributes:
        end: offset of the first byte after them.
        stop: number of rows of the run up to and including them.
        records: of `RowFormat.record`, those of the rows that were found, in order; a copy.
        found: bool ``[rows of the part]``; None: all were found.
    """

    end: int
    stop: int
    records: NDArray[np.void]
    found: NDArray[np.bool_] | None


class RowReplies:
    """Replies of one run of commands that are expected next.

    Args:
        row_format: of the rows.
        counts: int64 ``[number of commands]``, rows of each command, at least 1.

    Attributes:
        num_rows: of all commands.
        row: rows decoded so far.
        stops: int64 ``[number of commands]``: rows of the commands up to and including each.
        ends: int64 ``[number of commands]``: bytes of the replies up to and including each, if all rows are found.
    """

    def __init__(self, row_format: RowFormat, counts: NDArray[np.int64]) -> None:
        self.row = 0
        self._format = row_format
        self._counts = counts
        self._words, self._masks, self._lengths = _array_headers(counts)
        self.stops = stops = counts.cumsum()
        self.num_rows = int(stops[-1])
        self._firsts = stops - counts
        before = self._lengths.cumsum()
        # Offsets if all rows are found, from the start of the first reply: of the records, of the replies.
        self._starts = np.arange(self.num_rows) * row_format.record_bytes
        self._starts += before.repeat(counts)
        self._heads = self._firsts * row_format.record_bytes + before - self._lengths
        self.ends = stops * row_format.record_bytes + before
        self._command = 0  # the first whose header is not decoded
        self._decoded_bytes = 0  # what `row` rows take if all are found
        self._some_missing = False
        self._memory: Bytes | None = None
        self._records: NDArray[np.void]  # without fields: numpy copies structured elements field by field
        self._anywhere: NDArray[np.uint64]

    @property
    def done(self) -> bool:
        """Every row is decoded."""
        return self.row == self.num_rows

    def decode(self, buffer: Bytes, start: int, end: int) -> Part | None:
        """Decode the rows whose bytes have arrived; None if there is none. Call it until it returns None.

        Args:
            buffer: uint8.
            start: offset of the first byte that is not decoded yet.
            end: offset after the bytes that have arrived.

        Raises:
            ErrorReply: an error line in place of a command's reply. `skip` goes on after it.
            StoreError: an unexpected reply, or an error line within one.
        """
        if self.done or start == end:
            return None
        if buffer[start] == _ERROR:
            self._refuse(buffer, start, end, b"*")
            return None
        if end - start < self._format.record_bytes and self._is_begun(buffer, start, end):
            return None
        if self._memory is not buffer:
            self._memory = buffer
            self._records = _overlapping(buffer, np.dtype(f"V{self._format.record_bytes}"))
            self._anywhere = _overlapping(buffer, np.dtype("<u8"))
        part = None if self._some_missing else self._all_found(start, end)
        if part is None:
            if self._is_begun(buffer, start, end):
                return None
            part = self._by_markers(buffer, start, end) or self._by_records(buffer, start, end)
        if part is not None:
            self._some_missing = part.found is not None
            self.row = part.stop
            self._command = int(self._firsts.searchsorted(part.stop))
            self._decoded_bytes = int(self._starts[part.stop - 1]) + self._format.record_bytes
        return part

    def skip(self) -> None:
        """Take the next command's rows for decoded, because an error line came in place of its reply."""
        self.row = int(self.stops[self._command])
        self._decoded_bytes = int(self.ends[self._command])
        self._command += 1

    def _refuse(self, buffer: Bytes, at: int, end: int, expected: bytes) -> None:
        """Raise for the unexpected bytes at `at`, unless they are an incomplete error line. See `decode`."""
        try:
            refuse_reply(buffer, at, end, expected)
        except ErrorReply as error:
            if self._is_first():
                raise
            raise StoreError(f"{error}, within a reply") from None

    def _is_first(self) -> bool:
        """Whether the next row is the first of its command."""
        return self._command < len(self._firsts) and bool(self._firsts[self._command] == self.row)

    def _all_found(self, start: int, end: int) -> Part | None:
        """The complete records before an error line; None if there is none, or if one is not a found row's."""
        base, record_bytes = start - self._decoded_bytes, self._format.record_bytes
        stop = int(self._starts.searchsorted(end - base - record_bytes, "right"))
        if stop == self.row:
            return None
        commands = slice(self._command, int(self._firsts.searchsorted(stop)))
        matching = self._matching_headers(commands, self._heads[commands] + base)
        if not matching.all():  # an error line is in place of a reply, or a row is missing before it
            stop = int(self._firsts[self._command + int(matching.argmin())])
            if stop == self.row:
                return None
        starts = self._starts[self.row : stop] + base
        records = self._gather(starts)
        return Part(int(starts[-1]) + record_bytes, stop, records, None) if self._format.all_found(records) else None

    def _gather(self, starts: NDArray[np.int64]) -> NDArray[np.void]:
        """A copy of the records at these offsets."""
        return self._records[starts].view(self._format.record)

    def _matching_headers(self, commands: slice, heads: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these commands' replies starts at its offset, followed by a record: bool ``[commands]``."""
        matching: NDArray[np.bool_] = (self._anywhere[heads] & self._masks[commands]) == self._words[commands]
        return matching

    def _is_begun(self, buffer: Bytes, start: int, end: int) -> bool:
        """Whether the first record is an incomplete one of a found row: there is nothing to decode yet."""
        here = buffer[start : min(start + _ITEM_BYTES, end)].tobytes()
        at = self._item_header(here)
        if at is None:
            return False
        head = here[at : at + len(self._format.header)]
        return self._format.header.startswith(head) and end - start - at < self._format.record_bytes and head != b"$"

    def _item_header(self, here: bytes) -> int | None:
        """Bytes of the reply's header at the next row; None if it is not `here`."""
        if not self._is_first():
            return 0
        header = b"*%d\r\n" % self._counts[self._command]
        return len(header) if here.startswith(header) else None

    def _by_markers(self, buffer: Bytes, start: int, end: int) -> Part | None:
        """The complete records, some of which are markers; None if there is none, or if they are inconsistent."""
        base, record_bytes = start - self._decoded_bytes, self._format.record_bytes
        shift = record_bytes - len(_MISSING)
        markers = _find_markers(buffer, start, end)
        places = markers - base + shift * np.arange(len(markers))
        rows = self._starts.searchsorted(places)
        num_inside = int(rows.searchsorted(self.num_rows))
        rows, places = rows[:num_inside], places[:num_inside]
        if (self._starts[rows] != places).any():
            return None
        found = np.ones(self.num_rows - self.row, np.bool_)
        found[rows - self.row] = False
        shifts = (~found).cumsum() * shift
        ends = self._starts[self.row :] + (base + record_bytes) - shifts
        length = int(ends.searchsorted(end, "right"))
        if not length:
            return None
        found, ends = found[:length], ends[:length]
        records = self._gather(ends[found] - record_bytes)
        stop = self.row + length
        commands = slice(self._command, int(self._firsts.searchsorted(stop)))
        firsts = self._firsts[commands] - self.row
        sizes = np.where(found[firsts], record_bytes, len(_MISSING)) + self._lengths[commands]
        if not self._format.all_found(records) or not self._matching_headers(commands, ends[firsts] - sizes).all():
            return None
        return Part(int(ends[-1]), stop, records, found)

    def _by_records(self, buffer: Bytes, start: int, end: int) -> Part | None:
        """The complete records, one after the other; None if there is none.

        Raises:
            StoreError: the first bytes are not those of a reply.
        """
        header, record_bytes = self._format.header, self._format.record_bytes
        found: list[bool] = []
        starts: list[int] = []
        position, row, command = start, self.row, self._command
        while row < self.num_rows:
            at = position
            if command < len(self._firsts) and row == self._firsts[command]:
                expected = b"*%d\r\n" % self._counts[command]
                here = buffer[at : min(at + len(expected), end)].tobytes()
                if here != expected:
                    if not found and not expected.startswith(here):
                        self._refuse(buffer, at, end, expected)
                    break
                at += len(expected)
            here = buffer[at : min(at + max(len(header), len(_MISSING)), end)].tobytes()
            if here.startswith(_MISSING):
                found.append(False)
                position = at + len(_MISSING)
            elif here.startswith(header) and at + record_bytes <= end and _ends_line(buffer, at + record_bytes):
                found.append(True)
                starts.append(at)
                position = at + record_bytes
            else:
                begun = here.startswith(header) and at + record_bytes > end
                if not found and not begun and not _is_start(here, header) and not _is_start(here, _MISSING):
                    self._refuse(buffer, at, end, header)
                break
            if command < len(self._firsts) and row == self._firsts[command]:
                command += 1
            row += 1
        if not found:
            return None
        records = self._gather(np.array(starts, np.int64))
        return Part(position, row, records, np.array(found, np.bool_))


#: Enough bytes for the header of a reply and that of a row.
_ITEM_BYTES = 32


def _is_start(here: bytes, whole: bytes) -> bool:
    """Whether `here` is `whole` without its end."""
    return len(here) < len(whole) and whole.startswith(here)


def _ends_line(buffer: Bytes, end: int) -> bool:
    return buffer[end - len(_CRLF) : end].tobytes() == _CRLF


def _find_markers(buffer: Bytes, start: int, end: int) -> NDArray[np.int64]:
    """Offsets of all `$-1 CR LF` in ``buffer[start:end]``, ascending."""
    last = max(end - len(_MISSING) + 2, start + 1)
    dashes: NDArray[np.int64] = np.flatnonzero(buffer[start + 1 : last] == _MISSING[1]) + (start + 1)
    words: NDArray[np.uint32] = _overlapping(buffer, np.dtype("<u4"))
    markers: NDArray[np.int64] = dashes[words[dashes] == _MARKER_END] - 1
    starts: NDArray[np.int64] = markers[buffer[markers] == _MISSING[0]]
    return starts


def _masked_word(text: bytes) -> tuple[np.uint64, np.uint64]:
    """At most 8 bytes as a little-endian word, and the mask of these bytes."""
    return np.uint64(int.from_bytes(text, "little")), np.uint64(_FULL >> (8 * (_WORD_BYTES - len(text))))


def _array_headers(
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """Headers of replies with `counts` elements: as words, their masks, and their lengths. At most 99,999 elements."""
    words, masks, lengths = _header_table(1 << int(counts.max()).bit_length())
    return words[counts], masks[counts], lengths[counts]


@lru_cache(maxsize=16)
def _header_table(size: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    headers = [b"*%d\r\n" % count for count in range(size)]
    pairs = [_masked_word(header) for header in headers]
    return (
        np.array([word for word, _ in pairs], np.uint64),
        np.array([mask for _, mask in pairs], np.uint64),
        np.array([len(header) for header in headers], np.int64),
    )


def _overlapping(buffer: Bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Elements of `dtype` at every offset of the buffer at which one fits."""
    return np.ndarray((max(len(buffer) - dtype.itemsize + 1, 0),), dtype, buffer, 0, (1,))
