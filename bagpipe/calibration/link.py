"""`measure_link`: bandwidth and latency of a TCP connection of this host to itself."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

from bagpipe.cluster.model import Link

__all__ = ["measure_link"]

_BYTES = 128 << 20
_CHUNK = 1 << 20
_PINGS = 300
_TIMEOUT_S = 60.0


def measure_link() -> Link:
    """The link. Takes about a second.

    Raises:
        OSError: the host has no loopback interface.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=_TIMEOUT_S))
        receiver, _ = listener.accept()
        stack.enter_context(receiver)
        receiver.settimeout(_TIMEOUT_S)
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_answer, args=(receiver,), name="calibration-link", daemon=True)
        echo.start()
        pings = []
        for _ in range(_PINGS):
            start_s = time.perf_counter()
            sender.sendall(b"x")
            sender.recv(1)
            pings.append(time.perf_counter() - start_s)
        start_s, chunk = time.perf_counter(), bytes(_CHUNK)
        for _ in range(_BYTES // _CHUNK):
            sender.sendall(chunk)
        sender.recv(1)
        seconds = time.perf_counter() - start_s
        echo.join(_TIMEOUT_S)
    return Link(bytes_per_s=_BYTES / seconds, latency_s=sorted(pings)[_PINGS // 2] / 2)


def _answer(receiver: socket.socket) -> None:
    """Answer each single byte, then all of the bytes at once."""
    for _ in range(_PINGS):
        receiver.sendall(receiver.recv(1))
    left, buffer = _BYTES, bytearray(_CHUNK)
    while left:
        left -= receiver.recv_into(buffer)
    receiver.sendall(b"x")
