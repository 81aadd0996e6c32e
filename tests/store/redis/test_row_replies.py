"""The vectorised decoder of HMGET replies against a sequential one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import StoreError
from bagpipe.store.redis.resp_rows import ErrorReply
from bagpipe.store.redis.row_replies import RowFormat, RowReplies
from bagpipe.store.row_checksum import CHECK_BYTES, value_dtype

Rows = list[bytes | None]


def encode_replies(commands: list[Rows]) -> bytes:
    """HMGET replies, encoded sequentially."""
    return b"".join(
        b"*%d\r\n" % len(rows)
        + b"".join(b"$-1\r\n" if row is None else b"$%d\r\n%b\r\n" % (len(row), row) for row in rows)
        for rows in commands
    )


def parse_replies(data: bytes, counts: list[int], value_bytes: int) -> tuple[Rows, int | None]:
    """A sequential parser: the complete rows, and the offset after them; None if what follows is malformed."""
    position, rows = 0, list[bytes | None]()

    def meets(expected: bytes, at: int) -> bool | None:
        """Whether `expected` is there; None while it is incomplete."""
        part = data[at : at + len(expected)]
        return part == expected if len(part) == len(expected) else (None if expected.startswith(part) else False)

    def stuck(at: int) -> int | None:
        """Where a parser waits, for an error line too."""
        return position if data[at : at + 1] == b"-" and b"\r\n" not in data[at:] else None

    for count in counts:
        header = b"*%d\r\n" % count
        for number in range(count):
            at = position
            if number == 0:
                if not (here := meets(header, at)):
                    return rows, position if here is None else stuck(at)
                at += len(header)
            missing, found = meets(b"$-1\r\n", at), meets(b"$%d\r\n" % value_bytes, at)
            if missing:
                rows.append(None)
                position = at + 5
            elif found:
                start = at + len(b"$%d\r\n" % value_bytes)
                stop = start + value_bytes
                if len(data) < stop + 2:
                    return rows, position
                if data[stop : stop + 2] != b"\r\n":
                    return rows, None
                rows.append(data[start:stop])
                position = stop + 2
            else:
                return rows, position if missing is None or found is None else stuck(at)
    return rows, position


def decode(
    data: bytes, counts: list[int], value_bytes: int, cuts: list[int], before: bytes = b"", after: bytes = b""
) -> tuple[Rows, int | None]:
    """Result of RowReplies for `data` that arrives in pieces, between other bytes, in the form of `parse_replies`."""
    row_format = RowFormat(value_dtype(value_bytes - CHECK_BYTES))
    replies = RowReplies(row_format, np.array(counts))
    assert replies.num_rows == sum(counts)
    assert replies.ends[-1] == sum(row_format.max_reply_bytes(count) for count in counts)
    rows: Rows = []
    position = start = len(before)
    for cut in sorted({*cuts, len(data)}):
        # Bytes that have not arrived are stale ones.
        buffer = np.frombuffer(before + data[:cut] + (after * len(data))[: len(data)] + b"\0" * 16, np.uint8)
        try:
            while (part := replies.decode(buffer, position, start + cut)) is not None:
                assert part.stop == replies.row > len(rows)
                values = iter(part.records)
                found = [True] * (part.stop - len(rows)) if part.found is None else part.found.tolist()
                for here in found:
                    rows.append((value := next(values))["row"].tobytes() + value["check"].tobytes() if here else None)
                assert next(values, None) is None
                position = part.end
        except StoreError:
            return rows, None
        assert replies.done == (len(rows) == sum(counts))
    return rows, position - start


# Bytes that look like RESP, in every alignment, mixed with others.
TRICKY = st.sampled_from(
    [b"$-1\r\n", b"$12\r\n", b"$28\r\n", b"\r\n", b"$", b"*1\r\n", b"*12\r\n$-1\r\n", b"-ERR\r\n", b"\0", b"ab"]
)


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[Rows], int]:
    """Rows of one width of some commands, some missing, full of protocol bytes."""
    value_bytes = draw(st.sampled_from([12, 28, 108]))
    row = st.lists(TRICKY, max_size=12).map(lambda parts: (b"".join(parts) + b"." * value_bytes)[:value_bytes])
    plain = st.just(b"x" * value_bytes)
    rows = st.lists(draw(st.sampled_from([row, st.none() | row, st.none() | plain])), min_size=1, max_size=12)
    return draw(st.lists(rows, min_size=1, max_size=4)), value_bytes


def cuts_of(data: bytes) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(data)), max_size=6)


BEFORE = st.sampled_from([b"", b"junk\r\n", b"$-1\r\n"])
AFTER = st.sampled_from([b"", b"*1\r\n$-1\r\n", b"$-1\r\n"])


@given(replies(), BEFORE, AFTER, st.data())
def test_any_rows_arrive_in_any_pieces(
    reply: tuple[list[Rows], int], before: bytes, after: bytes, data: st.DataObject
) -> None:
    commands, value_bytes = reply
    counts, rows, whole = (
        [len(rows) for rows in commands],
        [row for some in commands for row in some],
        encode_replies(commands),
    )
    cuts = data.draw(cuts_of(whole))
    assert decode(whole, counts, value_bytes, cuts, before, after) == (rows, len(whole))
    # The end of the replies is found although more bytes follow.
    assert decode(whole + after, counts, value_bytes, cuts, before) == (rows, len(whole))


@given(replies(), AFTER, st.data())
def test_a_cut_reply_waits_for_the_rest(reply: tuple[list[Rows], int], after: bytes, data: st.DataObject) -> None:
    commands, value_bytes = reply
    whole = encode_replies(commands)
    short, counts = whole[: data.draw(st.integers(0, len(whole)))], [len(rows) for rows in commands]
    assert decode(short, counts, value_bytes, data.draw(cuts_of(short)), after=after) == parse_replies(
        short, counts, value_bytes
    )


@given(replies(), st.data())
def test_a_damaged_reply_is_read_as_a_sequential_reader_would(
    reply: tuple[list[Rows], int], data: st.DataObject
) -> None:
    commands, value_bytes = reply
    damaged = bytearray(encode_replies(commands))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position : position + 1] = data.draw(st.sampled_from([b"", b"\r", b"\n", b"$", b"1", b"-", b"::"]))
    counts = [len(rows) for rows in commands]
    expected = parse_replies(bytes(damaged), counts, value_bytes)
    assert decode(bytes(damaged), counts, value_bytes, []) == expected


@pytest.mark.parametrize("row_bytes", [4, 92, 256, 1024, 65_536, 2_000_000])
def test_every_length_of_row_header(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    value_bytes, num_rows = row_bytes + CHECK_BYTES, 30 if row_bytes < 1 << 20 else 3
    rows: Rows = [rng.bytes(value_bytes) if number % 3 else None for number in range(num_rows)]
    found: Rows = [row for row in rows if row is not None]
    nothing: Rows = [None] * num_rows
    for some in (rows, found, nothing):
        data = encode_replies([some, some])
        assert decode(data, [len(some)] * 2, value_bytes, [len(data) // 2]) == (some * 2, len(data))
    damaged = bytearray(encode_replies([found]))
    damaged[damaged.index(b"$") + len(b"$%d" % value_bytes)] ^= 1  # the CR of the first row's header
    assert decode(bytes(damaged), [len(found)], value_bytes, []) == ([], None)


def test_many_rows_are_decoded_in_few_parts() -> None:
    """A third of the rows is missing; the vectorised path must not fall back to single records."""
    rng = np.random.default_rng(0)
    commands: list[Rows] = [
        [rng.bytes(264) if rng.random() < 2 / 3 else None for _ in range(count)] for count in rng.integers(1, 40, 64)
    ]
    counts, data = [len(rows) for rows in commands], encode_replies(commands)
    replies = RowReplies(RowFormat(value_dtype(256)), np.array(counts))
    buffer = np.frombuffer(data + b"\0" * 16, np.uint8)
    half = replies.decode(buffer, 0, len(data) // 2)
    assert half is not None
    assert replies.decode(buffer, half.end, len(data) // 2) is None, "what is left is an incomplete record"
    rest = replies.decode(buffer, half.end, len(data))
    assert rest is not None
    assert (rest.end, replies.done) == (len(data), True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "answered an error: MOVED 3999 127.0.0.1:6381"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "answered an error: OOM command"),
        (b"*3\r\n$12\r\nabcd\r\n", r"answered b'\*3', expected b'\*2\\r\\n'"),
        (b"*2\r\n$5\r\nabcde\r\n$5\r\nabcde\r\n", r"answered b'\$5.*expected b'\$12"),
        (b"*2\r\n$-1\r\n$5\r\nabcde\r\n", r"answered b'\$5.*expected b'\$12"),
        (b"*2\r\n$-1\r\n_\r\n", r"answered b'_.*expected b'\$12"),
        (b"*2\r\n$-1\r\n$-1\r\n*1\r\n$-1\r\n", r"answered b'\*1.*expected b'\*2"),
        (b"HTTP/1.1 400 Bad Request\r\n", "answered b'HTTP"),
        (b"*-1\r\n", "answered"),
        (b"-" + b"x" * 70_000, "answered"),
    ],
)
def test_a_wrong_reply_is_refused(data: bytes, message: str) -> None:
    replies, buffer = RowReplies(RowFormat(value_dtype(4)), np.array([2, 2])), np.frombuffer(data, np.uint8)
    part = replies.decode(buffer, 0, len(data)) if data.startswith(b"*2\r\n$-1") else None
    with pytest.raises(StoreError, match=message):
        replies.decode(buffer, 0 if part is None else part.end, len(data))


def test_an_error_line_may_arrive_in_parts_and_has_its_position() -> None:
    data = b"*1\r\n$-1\r\n-ERR no\r\n"
    buffer = np.frombuffer(data, np.uint8)
    replies = RowReplies(RowFormat(value_dtype(4)), np.array([1, 1]))
    part = replies.decode(buffer, 0, len(data))
    assert part is not None
    assert [replies.decode(buffer, part.end, end) for end in range(part.end, len(data))] == [None] * 9
    with pytest.raises(ErrorReply) as caught:
        replies.decode(buffer, part.end, len(data))
    assert (caught.value.line, caught.value.start, caught.value.end) == ("ERR no", part.end, len(data))


def test_an_error_line_within_a_reply_is_no_answer_to_a_command() -> None:
    """A cluster client would take it for a redirection."""
    replies, data = RowReplies(RowFormat(value_dtype(4)), np.array([2])), b"*2\r\n$-1\r\n-MOVED 7 there:1\r\n"
    buffer = np.frombuffer(data, np.uint8)
    part = replies.decode(buffer, 0, len(data))
    assert part is not None
    with pytest.raises(StoreError, match="MOVED 7 there:1, within a reply") as caught:
        replies.decode(buffer, part.end, len(data))
    assert not isinstance(caught.value, ErrorReply)
