"""Frames over a socket pair: whole, in order, or a ChannelError."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.proto import channel as channel_module
from bagpipe.proto.channel import Channel, ChannelError, Frame, Kind

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(30)
    ours.settimeout(30)
    yield Channel(ours), theirs
    ours.close()
    theirs.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=300_000)), max_size=5))
def test_frames_arrive_whole_and_in_order(frames: list[tuple[Kind, bytes]]) -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)

    def send() -> None:
        for kind, payload in frames:
            sender.send(kind, payload)
        sender.close()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        received = list(iter(receiver.receive, None))
        sending.result()
    receiver.close()
    assert [(frame.kind, bytes(frame.payload)) for frame in received] == frames


def test_json(ends: Ends) -> None:
    channel, peer = ends
    other = Channel(peer)
    channel.send_json(Kind.END, {"skipped_rows": 3})
    frame = other.receive()
    assert frame is not None
    assert frame.json() == {"skipped_rows": 3}


@pytest.mark.parametrize("payload", [b"", b"[1]", b"3", b"{", b"\xff\xfe", b"[" * 100_000])
def test_payloads_that_are_no_json_object(payload: bytes) -> None:
    with pytest.raises(ChannelError, match="JSON"):
        Frame(Kind.END, bytearray(payload)).json()


def test_a_closed_peer_is_the_end(ends: Ends) -> None:
    channel, peer = ends
    peer.close()
    assert channel.receive() is None
    assert channel.receive() is None


@pytest.mark.parametrize("sent", [b"\x01", struct.pack("<II", 4, 10), struct.pack("<II", 4, 10) + b"half"])
def test_a_peer_that_stops_in_the_middle(ends: Ends, sent: bytes) -> None:
    channel, peer = ends
    peer.sendall(sent)
    peer.close()
    with pytest.raises(ChannelError, match="in the middle of a frame"):
        channel.receive()


@pytest.mark.parametrize("header", [(0, 0), (99, 4), (4, (1 << 30) + 1), (4, 2**32 - 1)])
def test_what_is_no_frame_is_refused_before_anything_is_allocated(ends: Ends, header: tuple[int, int]) -> None:
    channel, peer = ends
    peer.sendall(struct.pack("<II", *header))
    with pytest.raises(ChannelError, match=f"expected a frame, got kind {header[0]} of {header[1]} bytes"):
        channel.receive()


def test_a_payload_no_peer_would_take_is_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, _ = ends
    monkeypatch.setattr(channel_module, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(ChannelError, match="a STEP frame of 11 bytes, at most 10 can be sent"):
        channel.send(Kind.STEP, b"x" * 11)


def test_closing_wakes_a_thread_that_waits(ends: Ends) -> None:
    channel, _ = ends
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(channel.receive())
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    channel.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(outcome) == 1
    channel.close()  # harmless when called again


def test_sending_to_a_closed_peer_is_an_os_error(ends: Ends) -> None:
    channel, peer = ends
    peer.close()
    with pytest.raises(OSError, match="Broken pipe"):
        channel.send(Kind.ACK)
