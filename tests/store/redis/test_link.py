"""One socket, plain and TLS. Whole exchanges: test_request_pipeline."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bagpipe.errors import StoreError
from bagpipe.store.redis.link import Link, LinkLost
from tests.store.tls import Authority

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextmanager
def tls_pair(authority: Authority) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Both ends of a TLS connection."""
    files = authority.issue("link")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    client = ssl.create_default_context(cafile=str(authority.certificate))
    ours, theirs = socket.socketpair()
    ends: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: ends.append(server.wrap_socket(theirs, server_side=True)))
    thread.start()
    wrapped = client.wrap_socket(ours, server_hostname="localhost")
    thread.join()
    with wrapped, ends[0]:
        yield wrapped, ends[0]


def pieces_of(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def test_small_pieces_share_a_record(authority: Authority) -> None:
    with tls_pair(authority) as (ours, theirs):
        link = Link(ours, "there", ours.close)
        pieces = pieces_of(b"head", b"", b"body" * 10, b"next")
        assert link.send(pieces) == 48
        assert theirs.recv(1000) == b"".join(pieces), "one record"
        assert link.bytes_sent == 48


def test_a_large_piece_is_not_copied(authority: Authority) -> None:
    data = bytes(range(256)) * 4096
    with tls_pair(authority) as (ours, theirs):
        link, received = Link(ours, "there", ours.close), bytearray()

        def read() -> None:
            while len(received) < len(data) + 4:
                received.extend(theirs.recv(1 << 16))

        thread = threading.Thread(target=read)
        thread.start()
        pieces = pieces_of(data, b"tail")
        while pieces:
            # As a pipeline does: sent bytes are cut off, the rest is offered again.
            sent = link.send(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][sent:]
        thread.join()
        assert received == data + b"tail"


def test_no_data_is_not_the_end(authority: Authority) -> None:
    with tls_pair(authority) as (ours, theirs):
        link = Link(ours, "there", ours.close)
        link.check()
        assert link.receive(0, 0, 10) == (0, 0, False)
        theirs.sendall(b"x" * 40_000)
        end = 0
        while end < 40_000:
            _, end, _ = link.receive(0, end, 40_000)
        assert bytes(link.buffer[:end]) == b"x" * 40_000


def test_a_connection_that_ended_is_lost(authority: Authority, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours, "there", ours.close)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkLost, match="there: the server closed the connection") as caught:
            link.check()
        assert caught.value.endpoints == ("there",)
        with pytest.raises(ConnectionResetError):
            link.receive(0, 0, 10)
        link.close("enough")
        with pytest.raises(StoreError, match="there: the connection was closed: enough"):
            link.check()
