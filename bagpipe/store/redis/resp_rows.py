"""RESP encoders for batches of fixed-width rows, vectorised with numpy, and decoders of short replies. No sockets.

    request   *{2+n} HMGET key  then n fields   `$12 | table id`              one strided record array, filled by column
              *{2+n} HDEL key   then n fields
              *{2+2n} HSET key  then n pairs    `$12 | table id | $W | row check`
    reply     :{created}                                                      (HSET)
              :{removed}                                                      (HDEL)

A row is the whole value, including its check word; only `RowEncoder` distinguishes the two. Replies with rows are
decoded by `bagpipe.store.redis.row_replies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.keys import FIELD_BYTES
from bagpipe.store.redis.remedies import with_remedy
from bagpipe.store.row_checksum import CHECK_BYTES, check_words

__all__ = [
    "COUNT_REPLY_BYTES",
    "CommandHeaders",
    "ErrorReply",
    "FieldEncoder",
    "RowEncoder",
    "decode_count",
    "decode_counts",
    "decode_ok",
    "hdel_header",
    "hmget_header",
    "hset_header",
    "refuse_reply",
]

Bytes = NDArray[np.uint8]
Voids = NDArray[np.void]

_CRLF = b"\r\n"
_OK = b"+OK\r\n"
#: Numbers of rows whose headers `CommandHeaders` keeps.
_KEPT_STARTS = 256
#: Longest accepted reply to an HSET or HDEL.
COUNT_REPLY_BYTES = 24
#: Longest accepted error line; servers truncate theirs far earlier.
_MAX_LINE_BYTES = 64 * 1024


class ErrorReply(StoreError):
    """An error reply of the server.

    Attributes:
        line: its text, without the leading minus.
        start: offset of the line.
        end: offset after it, and after the other replies to a request that it speaks for.
        num_requests: requests that end with it.
    """

    def __init__(self, line: str, start: int, end: int) -> None:
        super().__init__(f"the store answered an error: {with_remedy(line)}")
        self.line = line
        self.start = start
        self.end = end
        self.num_requests = 1


def hmget_header(key: bytes, num_rows: int) -> bytes:
    """Header of an HMGET of `num_rows` rows."""
    return b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n" % (num_rows + 2, len(key), key)


def hdel_header(key: bytes, num_rows: int) -> bytes:
    """Header of an HDEL of `num_rows` rows."""
    return b"*%d\r\n$4\r\nHDEL\r\n$%d\r\n%b\r\n" % (num_rows + 2, len(key), key)


def hset_header(key: bytes, num_rows: int) -> bytes:
    """Header of an HSET of `num_rows` rows."""
    return b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n" % (2 * num_rows + 2, len(key), key)


class CommandHeaders:
    """Headers of commands on the buckets' keys. Those of one bucket differ by their number of rows only.

    Args:
        keys: key of each bucket.
        encode: `hmget_header`, `hdel_header` or `hset_header`.
    """

    def __init__(self, keys: Sequence[bytes], encode: Callable[[bytes, int], bytes]) -> None:
        self._ends = [encode(key, 0).partition(_CRLF)[2] for key in keys]
        self._starts = [encode(b"", number).partition(_CRLF)[0] + _CRLF for number in range(_KEPT_STARTS)]
        self._encode = encode
        self._keys = keys

    def of(self, bucket: int, num_rows: int) -> bytes:
        """Header of a command of `num_rows` rows on a bucket."""
        if num_rows < _KEPT_STARTS:
            return self._starts[num_rows] + self._ends[bucket]
        return self._encode(self._keys[bucket], num_rows)


class FieldEncoder:
    """Encodes the fields of an HMGET or HDEL. Constant bytes stay in a scratch array between calls."""

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


def decode_count(buffer: Bytes, start: int, end: int, num_rows: int) -> int | None:
    """Offset after the reply of an HSET or HDEL at `start`; None while it is incomplete.

    Raises:
        StoreError: an error reply (with the server's text), or not a count between 0 and `num_rows`.
    """
    line = buffer[start : min(start + COUNT_REPLY_BYTES, end)].tobytes()
    text, separator, _ = line.partition(_CRLF)
    if text.startswith(b":") and text[1:].isdigit() and separator and int(text[1:]) <= num_rows:
        return start + len(text) + 2
    if not line or (line.startswith(b":") and len(line) < COUNT_REPLY_BYTES and not separator):
        return None
    refuse_reply(buffer, start, end, b":0..%d\r\n" % num_rows)
    return None


def decode_counts(buffer: Bytes, start: int, end: int, counts: Sequence[int]) -> int | None:
    """Offset after the replies at `start` to HSETs or HDELs of `counts` rows each; None while they are incomplete.

    Raises:
        ErrorReply: the first error line, once all replies are there; it speaks for all.
        StoreError: as `decode_count`, for any other wrong reply.
    """
    data = buffer[start : min(start + COUNT_REPLY_BYTES * len(counts), end)].tobytes()
    lines = data.split(_CRLF, len(counts))
    if len(lines) > len(counts) and all(map(_is_count, lines, counts)):
        return start + len(data) - len(lines[-1])
    position, refusal = start, None
    for count in counts:
        try:
            after = decode_count(buffer, position, end, count)
        except ErrorReply as error:
            refusal, after = refusal or error, error.end
        if after is None:
            return None
        position = after
    if refusal is not None:
        raise ErrorReply(refusal.line, start, position)
    return position


def _is_count(line: bytes, num_rows: int) -> bool:
    return line == b":0" or (line.startswith(b":") and line[1:].isdigit() and int(line[1:]) <= num_rows)


def decode_ok(buffer: Bytes, start: int, end: int) -> int | None:
    """Offset after the reply `+OK` at `start`; None while it is incomplete.

    Raises:
        StoreError: any other reply.
    """
    line = buffer[start : min(start + len(_OK), end)].tobytes()
    if line == _OK:
        return start + len(_OK)
    if not _OK.startswith(line):
        refuse_reply(buffer, start, end, _OK)
    return None


def refuse_reply(buffer: Bytes, start: int, end: int, expected: bytes) -> None:
    """Raise for the unexpected bytes at `start`. Returns if they are an incomplete error line.

    Raises:
        ErrorReply: an error line.
        StoreError: any other bytes.
    """
    line, separator, _ = buffer[start : min(start + _MAX_LINE_BYTES, end)].tobytes().partition(_CRLF)
    if line.startswith(b"-"):
        if separator:
            raise ErrorReply(line[1:].decode(errors="replace"), start, start + len(line) + len(_CRLF))
        if len(line) < _MAX_LINE_BYTES:
            return
    raise StoreError(f"the store answered {line[:40]!r}, expected {expected!r}")
