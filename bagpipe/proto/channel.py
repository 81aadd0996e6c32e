"""Frames over a connected stream socket: an 8-byte header (kind, length), then the payload.

One reader thread and one writer thread may use a channel at once. A closed peer is the end of the stream, not an error.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["Channel", "ChannelError", "Frame", "Kind"]

_HEADER = struct.Struct("<II")  # kind, payload bytes
#: Larger payloads are refused before anything is allocated; a batch of 65,536 x 200 ids takes about 320 MB.
MAX_PAYLOAD_BYTES = 1 << 30


class Kind(enum.IntEnum):
    """What a frame carries."""

    OPEN = 1
    SCHEMA = 2
    START = 3
    STEP = 4
    ACK = 5
    END = 6
    ERROR = 7


class ChannelError(ConnectionError):
    """The peer sent something that is not a frame, or stopped in the middle of one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it came."""

    kind: Kind
    payload: bytearray

    def json(self) -> dict[str, Any]:
        """The payload as a JSON object.

        Raises:
            ChannelError: it is none.
        """
        try:
            value = json.loads(self.payload)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"expected JSON in a {self.kind.name} frame: {error}") from None
        if not isinstance(value, dict):
            raise ChannelError(f"expected a JSON object in a {self.kind.name} frame, got {type(value).__name__}")
        return value


class Channel:
    """Sends and receives frames. Does not own the socket's life beyond `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, kind: Kind, payload: bytes | bytearray = b"") -> None:
        """Send one frame; waits while the peer does not read.

        Raises:
            ChannelError: the payload is larger than a peer would take.
            OSError: the connection is gone.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ChannelError(f"a {kind.name} frame of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} can be sent")
        self._socket.sendall(_HEADER.pack(kind, len(payload)))
        if payload:
            self._socket.sendall(payload)

    def send_json(self, kind: Kind, value: dict[str, Any]) -> None:
        self.send(kind, json.dumps(value).encode())

    def receive(self) -> Frame | None:
        """The next frame, or None when the peer has closed.

        Raises:
            ChannelError: not a frame, too large, or cut short.
        """
        header = self._exactly(_HEADER.size)
        if header is None:
            return None
        kind, num_bytes = _HEADER.unpack(header)
        if kind not in Kind.__members__.values() or num_bytes > MAX_PAYLOAD_BYTES:
            raise ChannelError(f"expected a frame, got kind {kind} of {num_bytes} bytes")
        payload = self._exactly(num_bytes)
        if payload is None:
            raise ChannelError("the peer closed in the middle of a frame")
        return Frame(Kind(kind), payload)

    def close(self) -> None:
        """Close both directions; a thread blocked in `receive` wakes up."""
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, num_bytes: int) -> bytearray | None:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        received = 0
        while received < num_bytes:
            count = self._socket.recv_into(view[received:])
            if count == 0:
                if received:
                    raise ChannelError("the peer closed in the middle of a frame")
                return None
            received += count
        return buffer
