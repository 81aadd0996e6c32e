"""One connected socket to one server: sends and receives what goes without waiting, plain or TLS.

    pieces ──sendmsg | SSLSocket.send──> server ──recv_into──> one buffer, which grows to the longest reply

Rule: a link that was closed, or on which the server spoke unasked, is never used again.
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

#: Free space kept at the end of a receive buffer: a server's usual write (64 KiB) four times over.
_RECEIVE_BYTES = 256 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

#: Bytes of several pieces that go into one TLS record layer call: eight full records of 16 KiB.
_TLS_SEND_BYTES = 128 << 10


class LinkLost(StoreError):
    """A connection is gone, or silent for longer than the caller's patience; the server may live on elsewhere.

    Attributes:
        places: of the servers it concerns, as `Link.place`.
    """

    def __init__(self, message: str, *places: str) -> None:
        super().__init__(message)
        self.places = places


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far to run ahead of a server's answers.

    Attributes:
        promised_bytes: ask no more while replies of so many bytes are due.
        step_bytes: ask for about so many bytes of replies per send.
    """

    promised_bytes: int
    step_bytes: int


#: On the same machine. A server reads 16 KiB of requests before it answers any, and writes 64 KiB of answers before it
#: reads again; many requests at once make it compute first and write last, and us wait first and read last. Small steps
#: were 1.2 times as fast in benchmarks/store as everything at once, and keep the server's buffers in its cache.
_LOCAL_PACE = Pace(promised_bytes=384 << 10, step_bytes=32 << 10)
#: Over a network: 2 MiB fill 10 Gbit/s at a round trip of 1.6 ms.
_REMOTE_PACE = Pace(promised_bytes=2 << 20, step_bytes=256 << 10)


class Link:
    """One connected socket to one server, with its receive buffer and its totals.

    Attributes:
        place: the server's address without its password, for messages.
        pace: how far to run ahead of its answers.
        bytes_sent: since the link was made.
        bytes_received: since the link was made.
    """

    def __init__(self, sock: socket.socket, place: str, close: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.place = place
        self.pace = _LOCAL_PACE if sock.family == socket.AF_UNIX else _REMOTE_PACE
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sock = sock
        self._close = close
        self._broken: str | None = None
        self._memory = memoryview(bytearray(2 * _RECEIVE_BYTES))
        self.buffer: Bytes = np.frombuffer(self._memory, np.uint8)

    def check(self) -> None:
        """Refuse to use a link that was closed, or on which the server spoke unasked.

        Raises:
            StoreError: says why the link was closed.
        """
        if self._broken is not None:
            raise StoreError(f"{self.place}: the connection was closed: {self._broken}")
        try:
            unasked = self._sock.recv(1)
        except _WOULD_BLOCK:
            return
        if unasked:
            raise StoreError(f"{self.place}: bytes came unasked")
        raise LinkLost(f"{self.place}: the server closed the connection", self.place)

    def close(self, why: str) -> None:
        """Close the socket; every later use names the first reason. Idempotent."""
        if self._broken is None:
            self._broken = why
            self._close()

    def fileno(self) -> int:
        """The socket's file descriptor, for poll()."""
        return self._sock.fileno()

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Send what fits without waiting; bytes taken, 0 if none.

        Raises:
            OSError: the connection is gone.
        """
        try:
            if isinstance(self._sock, ssl.SSLSocket):  # has no sendmsg; a record per piece would be a packet per piece
                sent = self._sock.send(_joined(pieces))
            else:
                sent = self._sock.sendmsg(pieces)
        except _WOULD_BLOCK:
            return 0
        self.bytes_sent += sent
        return sent

    def receive(self, start: int, end: int, room: int) -> tuple[int, int, bool]:
        """Receive what is there without waiting, behind the unread bytes ``[start, end)`` of the buffer.

        Args:
            start: first unread byte.
            end: first free byte.
            room: bytes the unread and the new data together must be able to reach.

        Returns:
            (start, end, whether anything came); the unread bytes may have moved.

        Raises:
            OSError: the connection is gone.
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
    """The first pieces in one, about `_TLS_SEND_BYTES`; equal pieces give equal bytes, as OpenSSL asks of a retry."""
    if pieces[0].nbytes >= _TLS_SEND_BYTES or len(pieces) == 1:
        return pieces[0]
    count, num_bytes = 0, 0
    while count < len(pieces) and num_bytes < _TLS_SEND_BYTES:
        num_bytes += pieces[count].nbytes
        count += 1
    return b"".join(pieces[:count])
