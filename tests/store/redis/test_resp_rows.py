"""The vectorised encoder and decoder against sequential ones."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import StoreError
from bagpipe.store.redis.resp_rows import (
    ErrorReply,
    FieldEncoder,
    HmgetDecoder,
    RowEncoder,
    decode_hset,
    decode_ok,
    hmget_header,
    hset_header,
)
from bagpipe.store.row_checksum import check_words


def encode_reply(rows: list[bytes | None]) -> bytes:
    """An HMGET reply, encoded sequentially."""
    values = [b"$-1\r\n" if row is None else b"$%d\r\n%b\r\n" % (len(row), row) for row in rows]
    return b"*%d\r\n" % len(rows) + b"".join(values)


def parse_reply(data: bytes, num_rows: int, row_bytes: int) -> tuple[list[bytes | None], int] | str | None:
    """A sequential parser: (rows, end), None if incomplete, "wrong" if malformed."""
    position = 0

    def take(expected: bytes) -> bool | None:
        part = data[position : position + len(expected)]
        return part == expected if len(part) == len(expected) else (None if expected.startswith(part) else False)

    def refuse() -> str | None:
        """None for an incomplete error line."""
        rest = data[position:]
        return None if rest.startswith(b"-") and b"\r\n" not in rest else "wrong"

    header = b"*%d\r\n" % num_rows
    taken = take(header)
    if not taken:
        return None if taken is None else refuse()
    position = len(header)
    rows: list[bytes | None] = []
    while len(rows) < num_rows:
        missing, found = take(b"$-1\r\n"), take(b"$%d\r\n" % row_bytes)
        if missing:
            rows.append(None)
            position += 5
        elif found:
            start = position + len(b"$%d\r\n" % row_bytes)
            stop = start + row_bytes
            if len(data) < stop + 2:
                return None
            if data[stop : stop + 2] != b"\r\n":
                return "wrong"
            rows.append(data[start:stop])
            position = stop + 2
        else:
            return None if missing is None or found is None else refuse()
    return rows, position


def decode(data: bytes, num_rows: int, row_bytes: int, before: bytes = b"", after: bytes = b"") -> object:
    """Result of HmgetDecoder for `data` between other bytes, in the form of `parse_reply`."""
    buffer = np.frombuffer(before + data + after + b"\0" * 16, np.uint8)
    try:
        reply = HmgetDecoder(np.dtype(f"V{row_bytes}")).decode(buffer, len(before), len(before) + len(data), num_rows)
    except StoreError:
        return "wrong"
    if reply is None:
        return None
    found = np.ones(num_rows, np.bool_) if reply.found is None else reply.found
    values = iter(reply.rows)
    return [next(values).tobytes() if here else None for here in found], reply.end - len(before)


# Bytes that look like RESP, in every alignment, mixed with others.
TRICKY = st.sampled_from(
    [b"$-1\r\n", b"$4\r\n", b"$8\r\n", b"$20\r\n", b"\r\n", b"$", b"*1\r\n", b"-ERR\r\n", b"\0", b"ab"]
)


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[bytes | None], int]:
    """Rows of one width, some missing, full of protocol bytes."""
    row_bytes = draw(st.sampled_from([4, 8, 20, 100]))
    row = st.lists(TRICKY, max_size=row_bytes).map(lambda parts: (b"".join(parts) + b"." * row_bytes)[:row_bytes])
    return draw(st.lists(st.none() | row, min_size=1, max_size=24)), row_bytes


@given(replies(), st.sampled_from([b"", b"junk\r\n", b"$-1\r\n"]), st.sampled_from([b"", b"*1\r\n$-1\r\n", b"$-1\r\n"]))
def test_any_rows_round_trip(reply: tuple[list[bytes | None], int], before: bytes, after: bytes) -> None:
    rows, row_bytes = reply
    data = encode_reply(rows)
    assert decode(data, len(rows), row_bytes, before, after) == (rows, len(data))
    # The end of the reply is found although more bytes follow.
    assert decode(data + after, len(rows), row_bytes, before) == (rows, len(data))


@given(replies(), st.data())
def test_a_cut_reply_waits_for_the_rest(reply: tuple[list[bytes | None], int], data: st.DataObject) -> None:
    rows, row_bytes = reply
    whole = encode_reply(rows)
    cut = data.draw(st.integers(0, len(whole) - 1))
    # Bytes behind the cut are stale and must not matter.
    assert decode(whole[:cut], len(rows), row_bytes, after=whole[cut:]) is None
    assert decode(whole[:cut], len(rows), row_bytes, after=b"$-1\r\n" * 40) is None


@given(replies(), st.data())
def test_a_damaged_reply_is_read_as_a_sequential_reader_would(
    reply: tuple[list[bytes | None], int], data: st.DataObject
) -> None:
    rows, row_bytes = reply
    damaged = bytearray(encode_reply(rows))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position : position + 1] = data.draw(st.sampled_from([b"", b"\r", b"\n", b"$", b"1", b"-", b"::"]))
    assert decode(bytes(damaged), len(rows), row_bytes) == parse_reply(bytes(damaged), len(rows), row_bytes)


@pytest.mark.parametrize("row_bytes", [4, 12, 100, 256, 1024, 65_536])
def test_every_length_of_row_header(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    rows: list[bytes | None] = [rng.bytes(row_bytes) if number % 3 else None for number in range(30)]
    found: list[bytes | None] = [row for row in rows if row is not None]
    nothing: list[bytes | None] = [None] * 30
    for some in (rows, found, nothing):
        data = encode_reply(some)
        assert decode(data, len(some), row_bytes) == (some, len(data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "answered an error: MOVED 3999 127.0.0.1:6381"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "answered an error: OOM command"),
        (b"*3\r\n$4\r\nabcd\r\n", r"answered b'\*3', expected b'\*2\\r\\n'"),
        (b"*2\r\n$5\r\nabcde\r\n$5\r\nabcde\r\n", r"answered b'\$5.*expected b'\$4"),
        (b"*2\r\n$-1\r\n$5\r\nabcde\r\n", r"answered b'\$5.*expected b'\$4"),
        (b"*2\r\n$-1\r\n_\r\n", r"answered b'_.*expected b'\$4"),
        (b"HTTP/1.1 400 Bad Request\r\n", "answered b'HTTP"),
        (b"*-1\r\n", "answered"),
        (b"-" + b"x" * 70_000, "answered"),
    ],
)
def test_a_wrong_reply_is_refused(data: bytes, message: str) -> None:
    buffer = np.frombuffer(data, np.uint8)
    with pytest.raises(StoreError, match=message):
        HmgetDecoder(np.dtype("V4")).decode(buffer, 0, len(data), 2)


def test_an_error_line_may_arrive_in_parts() -> None:
    buffer = np.frombuffer(b"-ERR no\r\n", np.uint8)
    assert [HmgetDecoder(np.dtype("V4")).decode(buffer, 0, end, 2) for end in range(9)] == [None] * 9
    assert [decode_hset(buffer, 0, end, 2) for end in range(9)] == [None] * 9


@pytest.mark.parametrize(
    ("data", "end"), [(b":0\r\n", 4), (b":12\r\n*", 5), (b":", None), (b":1", None), (b":1\r", None)]
)
def test_hset_reply(data: bytes, end: int | None) -> None:
    assert decode_hset(np.frombuffer(data, np.uint8), 0, len(data), 12) == end


@pytest.mark.parametrize(
    "data", [b":13\r\n", b":-1\r\n", b"+OK\r\n", b"-ERR x\r\n", b":1x\r\n", b":" + b"1" * 30, b":\r\n"]
)
def test_a_wrong_hset_reply_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_hset(np.frombuffer(data, np.uint8), 0, len(data), 12)


def plain_command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def test_requests_equal_a_plain_encoders() -> None:
    tables, ids = np.array([0, 2, 7], np.uint32), np.array([-1, 5, 2**40], np.int64)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    order = np.array([2, 0, 1])
    fields = [struct.pack(">Iq", table, row_id) for table, row_id in zip(tables, ids, strict=True)]
    hmget = hmget_header(b"job:{3}", 3) + FieldEncoder().encode(tables, ids).tobytes()
    assert hmget == plain_command(b"HMGET", b"job:{3}", *fields)
    voids = rows[order].view("V16").ravel()
    checks = check_words(tables, ids, voids)
    values = [row.tobytes() + check.tobytes() for row, check in zip(voids, checks, strict=True)]
    pairs = [word for pair in zip(fields, values, strict=True) for word in pair]
    filled = np.zeros(3, np.uint64)
    hset = hset_header(b"job:{3}", 3) + RowEncoder(16).encode(tables, ids, voids, filled).tobytes()
    assert filled.tolist() == checks.tolist()
    assert hset == plain_command(b"HSET", b"job:{3}", *pairs)


def test_an_encoder_is_used_again_with_more_and_fewer_rows() -> None:
    encoder, once = FieldEncoder(), FieldEncoder()
    for count in (3, 10, 2):
        tables, ids = np.full(count, count, np.uint32), np.arange(count, dtype=np.int64)
        assert encoder.encode(tables, ids).tobytes() == FieldEncoder().encode(tables, ids).tobytes()
    assert once.record_bytes == 19


def test_an_error_reply_has_its_position() -> None:
    data = b":1\r\n-MOVED 3999 10.0.0.1:7000\r\n:0\r\n"
    with pytest.raises(ErrorReply) as caught:
        decode_hset(np.frombuffer(data, np.uint8), 4, len(data), 12)
    assert (caught.value.line, caught.value.start, caught.value.end) == ("MOVED 3999 10.0.0.1:7000", 4, len(data) - 4)


@pytest.mark.parametrize(("data", "end"), [(b"+OK\r\n", 5), (b"+OK\r\n:1\r\n", 5), (b"", None), (b"+OK\r", None)])
def test_ok_reply(data: bytes, end: int | None) -> None:
    assert decode_ok(np.frombuffer(data, np.uint8), 0, len(data)) == end


@pytest.mark.parametrize("data", [b"+KO\r\n", b":1\r\n", b"-ERR x\r\n"])
def test_a_wrong_ok_reply_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_ok(np.frombuffer(data, np.uint8), 0, len(data))
