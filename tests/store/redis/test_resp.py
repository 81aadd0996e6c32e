from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import StoreError
from bagpipe.store.redis.resp import ErrorLine, Reply, parse_reply

REPLIES = st.recursive(
    st.none()
    | st.integers(-(2**40), 2**40)
    | st.binary(max_size=20)
    | st.text("abc XYZ-+", max_size=20)
    | st.text("abc XYZ-+", max_size=20).map(ErrorLine),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def encode(reply: Reply) -> bytes:
    """Straightforward encoder."""
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case str():
            return b"+%b\r\n" % reply.encode()
        case ErrorLine(line):
            return b"-%b\r\n" % line.encode()
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


@given(REPLIES, st.sampled_from([b"", b":1\r\n"]), st.sampled_from([b"", b"+OK\r\n", b":"]), st.data())
def test_encoded_replies_are_decoded(reply: Reply, before: bytes, after: bytes, data: st.DataObject) -> None:
    encoded = encode(reply)
    assert parse_reply(before + encoded + after, len(before)) == (reply, len(before + encoded))
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert parse_reply(before + encoded[:cut], len(before)) is None


def test_no_array_at_all() -> None:
    assert parse_reply(b"*-1\r\n", 0) == (None, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400\r\n",
        b":x\r\n",
        b"$\r\n",
        b"*1\r\n?\r\n",
        b":1-\r\n",
        b"*70000\r\n",
        b"*1\r\n" * 9 + b":1\r\n",
        b"\r\n",
    ],
)
def test_invalid_replies(data: bytes) -> None:
    with pytest.raises(StoreError, match="the store answered"):
        parse_reply(data, 0)
