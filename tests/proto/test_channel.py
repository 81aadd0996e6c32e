from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from bagpipe.proto.channel import MAX_PAYLOAD_BYTES, Channel, ChannelError, Kind

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_frames_arrive_as_sent(pair: Pair) -> None:
    channel, theirs = pair
    other = Channel(theirs)
    channel.send_json(Kind.OPEN, {"seed": 7})
    channel.send(Kind.ACK)
    channel.send(Kind.STEP, b"\x00\x01")
    frames = [other.receive() for _ in range(3)]
    assert [(frame.kind, bytes(frame.payload)) for frame in frames if frame is not None] == [
        (Kind.OPEN, b'{"seed": 7}'),
        (Kind.ACK, b""),
        (Kind.STEP, b"\x00\x01"),
    ]
    assert frames[0] is not None
    assert frames[0].json() == {"seed": 7}


def test_a_closed_peer_is_the_end(pair: Pair) -> None:
    channel, theirs = pair
    theirs.close()
    assert channel.receive() is None


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<II", 99, 0),
        struct.pack("<II", Kind.STEP, MAX_PAYLOAD_BYTES + 1),
        struct.pack("<II", Kind.STEP, 10) + b"short",
        b"\x04\x00",
    ],
    ids=["unknown kind", "too large", "cut payload", "cut header"],
)
def test_nonsense_is_an_error(pair: Pair, sent: bytes) -> None:
    channel, theirs = pair
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(ChannelError):
        channel.receive()


@pytest.mark.parametrize("payload", [b"[1]", b"{", b"\xff"])
def test_a_payload_that_is_no_object(pair: Pair, payload: bytes) -> None:
    channel, theirs = pair
    Channel(theirs).send(Kind.END, payload)
    frame = channel.receive()
    assert frame is not None
    with pytest.raises(ChannelError, match="JSON"):
        frame.json()


def test_closing_wakes_the_reader_and_may_be_repeated(pair: Pair) -> None:
    channel, theirs = pair
    channel.close()
    channel.close()
    assert theirs.recv(1) == b""
