"""A socket with limits for whole replies. Against a server: test_hostile_server."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from bagpipe.store.redis.bounded_socket import MAX_REPLY_BYTES, BoundedSocket, ReplyTooLarge
from bagpipe.store.redis.ledger import _groups_at_once
from bagpipe.store.redis.row_codecs import max_command_rows


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
    with pytest.raises(ReplyTooLarge, match="with more than 0 MiB"):
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


def test_a_server_says_why_it_hangs_up(pair: tuple[socket.socket, socket.socket]) -> None:
    sock = BoundedSocket(pair[0], timeout_s=30.0)
    pair[1].sendall(b"-ERR max number of clients reached\r\n")
    pair[1].close()
    sock.sendall(b"command")
    sock.sendall(b"another")
    assert sock.recv(100) == b"-ERR max number of clients reached\r\n"
    assert sock.recv(100) == b""


def test_a_look_without_waiting(pair: tuple[socket.socket, socket.socket]) -> None:
    """redis-py asks whether a connection from its pool has unread bytes."""
    sock = BoundedSocket(pair[0], timeout_s=0.0001)
    sock.settimeout(0)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    assert sock.fileno() == pair[0].fileno()


@pytest.mark.parametrize("row_bytes", [4, 8, 24, 256, 1 << 20])
def test_logs_are_read_in_parts_that_fit_a_reply(row_bytes: int) -> None:
    """Groups of narrow rows hold many fields. A reply has a few bytes for each group beside them."""
    num_groups = _groups_at_once(row_bytes)
    assert 1 <= num_groups <= 256
    assert num_groups * (12 * max_command_rows(row_bytes) + 32) < MAX_REPLY_BYTES
