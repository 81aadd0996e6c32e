"""`Link`: one connected socket to one server. Non-blocking sends and receives, plain or TLS.

    pieces ──sendmsg | SSLSocket.send──> server ──recv_into──> one buffer, which grows to the longest reply

A link that was closed, or that received bytes without a request, is never used again.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError

__all__ = ["Bytes", "Link", "LinkLost", "Pace"]

Bytes = NDArray[np.uint8]

#: Free space kept at the end of a receive buffer: twice a server's usual write (64 KiB).
_RECEIVE_BYTES = 128 << 10
#: Length of a receive buffer at first.
_BUFFER_BYTES = 512 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

#: Bytes of joined pieces per SSLSocket.send: eight full TLS records of 16 KiB.
_TLS_SEND_BYTES = 128 << 10


class LinkLost(StoreError):
    """A connection is lost, or silent for too long. The server may still be running.

    Attributes:
        endpoints: `Link.endpoint` of the servers concerned.
    """

    def __init__(self, message: str, *endpoints: str) -> None:
        super().__init__(message)
        self.endpoints = endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Bounds on the requests sent ahead of their replies.

    Attributes:
        promised_bytes: bound on the bytes of outstanding replies.
        step_bytes: approximate bytes of replies requested per send.
    """

    promised_bytes: int
    step_bytes: int


#: On the same machine. A server reads 16 KiB of requests before it replies, and writes 64 KiB of replies before it
#: reads again. With many requests at once it computes first and writes last, while the client waits. Small steps were
#: 1.2 times as fast in benchmarks/store, and keep the server's buffers in its cache.
_LOCAL_PACE = Pace(promised_bytes=384 << 10, step_bytes=32 << 10)
#: Over a network: 2 MiB fill 10 Gbit/s at a round trip of 1.6 ms.
_REMOTE_PACE = Pace(promised_bytes=2 << 20, step_bytes=256 << 10)


class Link:
    """One connected socket to one server, with its receive buffer and its totals.

    Attributes:
        endpoint: the server's URL without the password, for messages.
        pace: how far requests run ahead of replies.
        bytes_sent: since the link was made.
        bytes_received: since the link was made.
    """

    def __init__(self, sock: socket.socket, endpoint: str, close: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.endpoint = endpoint
        self.pace = _LOCAL_PACE if sock.family == socket.AF_UNIX else _REMOTE_PACE
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock
        self._close = close
        self._broken: str | None = None
        self._memory = memoryview(bytearray(_BUFFER_BYTES))
        self.buffer: Bytes = np.frombuffer(self._memory, np.uint8)

    def check(self) -> None:
        """Check that the link is open and has no unread bytes.

        Raises:
            StoreError: the link was closed (names the reason), or the server sent bytes without a request.
            LinkLost: the server closed the connection.
        """
        if self._broken is not None:
            raise StoreError(f"{self.endpoint}: the connection was closed: {self._broken}")
        try:
            unasked = self._sock.recv(1)
        except _WOULD_BLOCK:
            return
        if unasked:
            raise StoreError(f"{self.endpoint}: received bytes without a request")
        raise LinkLost(f"{self.endpoint}: the server closed the connection", self.endpoint)

    def close(self, why: str) -> None:
        """Close the socket. Idempotent; later uses report the first reason."""
        if self._broken is None:
            self._broken = why
            self._close()

    def fileno(self) -> int:
        """The socket's file descriptor, for poll()."""
        return self._sock.fileno()

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Send without blocking. Returns the bytes sent, 0 if the socket is full.

        Raises:
            OSError: the connection is lost.
        """
        try:
            if isinstance(
                self._sock, ssl.SSLSocket
            ):  # has no sendmsg; one record per piece would be one packet per piece
                sent = self._sock.send(_joined(pieces))
            else:
                sent = self._sock.sendmsg(pieces)
        except _WOULD_BLOCK:
            return 0
        self.bytes_sent += sent
        return sent

    def receive(self, start: int, end: int, room: int) -> tuple[int, int, bool]:
        """Receive without blocking, behind the unread bytes ``[start, end)`` of the buffer.

        Args:
            start: first unread byte.
            end: first free byte.
            room: bytes that unread and new data together can reach.

        Returns:
            (start, end, whether bytes arrived); unread bytes can move.

        Raises:
            OSError: the connection is lost.
        """
        if start == end:
            start = end = 0
        if len(self._memory) - end < _RECEIVE_BYTES:
            start, end = self._make_room(start, end, room)
        try:
            received = self._sock.recv_into(self._memory[end:])
        except _WOULD_BLOCK:
            return start, end, False
        if not received:
            raise ConnectionResetError("the server closed the connection")
        self.bytes_received += received
        return start, end + received, True

    def _make_room(self, start: int, end: int, room: int) -> tuple[int, int]:
        memory = self._memory
        if len(memory) < room + _RECEIVE_BYTES:
            memory = memoryview(bytearray(2 * room + _RECEIVE_BYTES))
        unread = bytes(self._memory[start:end])
        memory[: len(unread)] = unread
        if memory is not self._memory:
            self._memory, self.buffer = memory, np.frombuffer(memory, np.uint8)
        return 0, len(unread)


def _joined(pieces: Sequence[memoryview]) -> bytes | memoryview:
    """The first pieces joined, about `_TLS_SEND_BYTES`. Deterministic, as OpenSSL requires of a retry."""
    if pieces[0].nbytes >= _TLS_SEND_BYTES or len(pieces) == 1:
        return pieces[0]
    count, num_bytes = 0, 0
    while count < len(pieces) and num_bytes < _TLS_SEND_BYTES:
        num_bytes += pieces[count].nbytes
        count += 1
    return b"".join(pieces[:count])
