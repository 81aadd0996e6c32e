"""The vectorised encoders against sequential ones, and the decoders of short replies."""

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
    RowEncoder,
    decode_count,
    decode_counts,
    decode_ok,
    hmget_header,
    hset_header,
)
from bagpipe.store.row_checksum import check_words


def test_an_error_line_may_arrive_in_parts() -> None:
    buffer = np.frombuffer(b"-ERR no\r\n", np.uint8)
    assert [decode_count(buffer, 0, end, 2) for end in range(9)] == [None] * 9


@pytest.mark.parametrize(
    ("data", "end"), [(b":0\r\n", 4), (b":12\r\n*", 5), (b":", None), (b":1", None), (b":1\r", None)]
)
def test_hset_reply(data: bytes, end: int | None) -> None:
    assert decode_count(np.frombuffer(data, np.uint8), 0, len(data), 12) == end


@pytest.mark.parametrize(
    "data", [b":13\r\n", b":-1\r\n", b"+OK\r\n", b"-ERR x\r\n", b":1x\r\n", b":" + b"1" * 30, b":\r\n"]
)
def test_a_wrong_hset_reply_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_count(np.frombuffer(data, np.uint8), 0, len(data), 12)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8), st.data())
def test_hset_replies_equal_those_of_one_after_the_other(created: list[int], data: st.DataObject) -> None:
    text = bytearray(b"".join(b":%d\r\n" % number for number in created))
    for _ in range(data.draw(st.integers(0, 2))):
        position = data.draw(st.integers(0, len(text) - 1))
        text[position : position + 1] = data.draw(st.sampled_from([b"", b"\r", b"\n", b"-", b"9", b":0\r\n"]))
    counts = [max(number, 100) for number in created]
    buffer = np.frombuffer(b"xy" + bytes(text) + b":0\r\n", np.uint8)
    for end in (len(buffer), data.draw(st.integers(2, len(buffer)))):
        after: int | None = 2
        error = refusal = None
        try:
            for count in counts:
                try:
                    after = None if after is None else decode_count(buffer, after, end, count)
                except ErrorReply as raised:
                    refusal, after = refusal or str(raised), raised.end
        except StoreError as raised:
            error = str(raised)
        error = error or (refusal if after is not None else None)
        if error is None:
            assert decode_counts(buffer, 2, end, counts) == after
        else:
            with pytest.raises(StoreError) as caught:
                decode_counts(buffer, 2, end, counts)
            assert str(caught.value) == error


def test_an_error_line_among_replies_speaks_for_all_of_them() -> None:
    data = b":0\r\n-NOREPLICAS no\r\n:1\r\n-BUSY no\r\n"
    buffer = np.frombuffer(data + b":1\r\n", np.uint8)
    for end in range(len(data)):
        assert decode_counts(buffer, 0, end, [1, 1, 1, 1]) is None
    with pytest.raises(ErrorReply) as caught:
        decode_counts(buffer, 0, len(data), [1, 1, 1, 1])
    assert (caught.value.line, caught.value.start, caught.value.end) == ("NOREPLICAS no", 0, len(data))


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
        decode_count(np.frombuffer(data, np.uint8), 4, len(data), 12)
    assert (caught.value.line, caught.value.start, caught.value.end) == ("MOVED 3999 10.0.0.1:7000", 4, len(data) - 4)


@pytest.mark.parametrize(("data", "end"), [(b"+OK\r\n", 5), (b"+OK\r\n:1\r\n", 5), (b"", None), (b"+OK\r", None)])
def test_ok_reply(data: bytes, end: int | None) -> None:
    assert decode_ok(np.frombuffer(data, np.uint8), 0, len(data)) == end


@pytest.mark.parametrize("data", [b"+KO\r\n", b":1\r\n", b"-ERR x\r\n"])
def test_a_wrong_ok_reply_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_ok(np.frombuffer(data, np.uint8), 0, len(data))
