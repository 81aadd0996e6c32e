"""A socket with limits for whole replies. Against a server: test_hostile_server."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis

from bagpipe.store.redis.bounded_socket import BoundedSocket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_bytes_are_limited_from_one_command_to_the_next(pair: tuple[socket.socket, socket.socket]) -> None:
    sock = BoundedSocket(pair[0], timeout_s=30.0, max_bytes=10)
    for _ in range(3):
        sock.sendall(b"command")
        sock.sendall(b"another")
        assert pair[1].recv(100) == b"commandanother"
        pair[1].sendall(b"12345678")
        assert sock.recv(5) + sock.recv(5) == b"12345678"
    pair[1].sendall(b"123")
    with pytest.raises(redis.InvalidResponse, match="an answer of more than 0 MiB"):
        sock.recv(5)


def test_the_deadline_holds_for_all_pieces(pair: tuple[socket.socket, socket.socket]) -> None:
    sock = BoundedSocket(pair[0], timeout_s=0.2)
    sock.sendall(b"command")

    def drip() -> None:
        while True:
            pair[1].sendall(b"x")
            assert sock.recv(1) == b"x"

    with pytest.raises(TimeoutError):
        drip()
    sock.sendall(b"command")
    pair[1].sendall(b"x")
    assert sock.recv(1) == b"x"


def test_a_look_without_waiting(pair: tuple[socket.socket, socket.socket]) -> None:
    """redis-py asks whether a connection from its pool has unread bytes."""
    sock = BoundedSocket(pair[0], timeout_s=0.0001)
    sock.settimeout(0)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    assert sock.fileno() == pair[0].fileno()
