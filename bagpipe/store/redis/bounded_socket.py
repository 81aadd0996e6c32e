"""`BoundedSocket`: a socket for redis-py whose replies are bounded in time and bytes.

    commands ──sendall──> server ──recv──> at most `timeout_s` and `max_bytes` until the next command

redis-py limits the wait for each piece of a reply. A server that sends a byte now and then would hold it forever, and a
reply without end would take all memory.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

import redis
from redis.connection import AbstractConnection

__all__ = ["MAX_REPLY_BYTES", "BoundedSocket", "ReplyTooLarge", "bounded"]

#: Bytes of the replies to commands that were sent together. Decoded, they take up to six times as much.
MAX_REPLY_BYTES = 8 << 20

#: Classes that `bounded` has made.
_BOUNDED: dict[type[AbstractConnection], type[AbstractConnection]] = {}


class ReplyTooLarge(redis.InvalidResponse):  # type: ignore[misc]  # redis-py has no types
    """More bytes than the replies to administrative commands have."""


class BoundedSocket:
    """A connected socket. Other attributes are those of the socket.

    Args:
        raw: plain or TLS.
        timeout_s: limit for sending and for all replies to what was sent together.
        max_bytes: limit for these replies.

    Attributes:
        raw: the socket.
    """

    def __init__(self, raw: socket.socket, *, timeout_s: float, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self.raw = raw
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._step_s: float | None = timeout_s  # redis-py's own limit; 0 while it asks whether anything has come
        self._is_answered = True
        self._deadline_s = 0.0
        self._received_bytes = 0
        self._renew()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def settimeout(self, timeout_s: float | None) -> None:
        """Limit of a single call, within the deadline."""
        self._step_s = timeout_s

    def sendall(self, data: bytes) -> None:
        """Send. The first call after a reply starts the limits again.

        A server that has hung up may have said why: nothing is raised for it, because the answer is read next.

        Raises:
            TimeoutError: the deadline has passed.
        """
        if self._is_answered:
            self._renew()
        self.raw.settimeout(self._left_s())
        with suppress(BrokenPipeError, ConnectionResetError):
            self.raw.sendall(data)

    def recv(self, num_bytes: int) -> bytes:
        """Receive.

        Raises:
            TimeoutError: the deadline has passed.
            ReplyTooLarge: more bytes than `max_bytes`.
        """
        self._is_answered = True
        self.raw.settimeout(self._left_s() if self._step_s is None else min(self._step_s, self._left_s()))
        data = self.raw.recv(num_bytes)
        self._received_bytes += len(data)
        if self._received_bytes > self._max_bytes:
            raise ReplyTooLarge(f"it answers an administrative command with more than {self._max_bytes >> 20} MiB")
        return data

    def _renew(self) -> None:
        self._is_answered = False
        self._deadline_s = time.monotonic() + self._timeout_s
        self._received_bytes = 0

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0 and self._step_s != 0:
            raise TimeoutError("timed out")
        return max(left_s, 0.0)


def bounded(connection_class: type[AbstractConnection]) -> type[AbstractConnection]:
    """A class of redis-py connections like this one, with bounded sockets: `socket_timeout` holds for whole replies."""
    if connection_class not in _BOUNDED:

        class Bounded(connection_class):  # type: ignore[misc]  # a class that is known by value
            def _connect(self) -> BoundedSocket:
                return BoundedSocket(super()._connect(), timeout_s=self.socket_timeout)

        _BOUNDED[connection_class] = Bounded
    return _BOUNDED[connection_class]
