from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.harness.proxy import ConnectionFault, ConnectionFaultKind, FaultyProxy

pytestmark = pytest.mark.usefixtures("no_leaks")

TIMEOUT_S = 20.0


class Echo:
    """A server that answers every line with the same line and counts the lines."""

    def __init__(self, family: socket.AddressFamily, address: object) -> None:
        self.lines: list[bytes] = []
        self.is_reset = threading.Event()
        self.listener = socket.socket(family)
        self.listener.bind(address)
        self.listener.listen()
        self.threads = [threading.Thread(target=self.accept)]
        self.connections: list[socket.socket] = []
        self.threads[0].start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                self.threads.append(threading.Thread(target=self.answer, args=(connection,)))
                self.threads[-1].start()

    def answer(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as file:
                for line in file:
                    self.lines.append(line)
                    connection.sendall(line)
        except ConnectionResetError:
            self.is_reset.set()
        except BrokenPipeError:
            pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        self.listener.close()


@pytest.fixture(params=["unix", "tcp"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    path = str(tmp_path / "echo.sock")
    server = Echo(socket.AF_UNIX, path) if request.param == "unix" else Echo(socket.AF_INET, ("127.0.0.1", 0))
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo, tmp_path: Path) -> Iterator[FaultyProxy]:
    address = echo.listener.getsockname()
    if isinstance(address, str):
        proxy = FaultyProxy(f"unix://{address}", listen=tmp_path / "proxy.sock")
    else:
        proxy = FaultyProxy(f"redis://127.0.0.1:{address[1]}")
    with proxy:
        yield proxy


def connected(proxy: FaultyProxy) -> socket.socket:
    parts = urlsplit(proxy.url)
    if parts.scheme == "unix":
        client = socket.socket(socket.AF_UNIX)
        client.connect(unquote(parts.path))
    else:
        assert parts.port is not None
        client = socket.create_connection(("127.0.0.1", parts.port))
    client.settimeout(TIMEOUT_S)
    return client


def asked(client: socket.socket, line: bytes) -> bytes:
    client.sendall(line)
    return client.recv(1000)


def test_the_proxy_forwards_all_bytes(proxy: FaultyProxy, echo: Echo) -> None:
    with connected(proxy) as client, connected(proxy) as other:
        assert asked(client, b"one\n") == b"one\n"
        assert asked(other, b"two\n") == b"two\n"
        assert asked(client, b"three\n") == b"three\n"
    assert (echo.lines, proxy.num_answers, proxy.num_fired) == ([b"one\n", b"two\n", b"three\n"], 3, 0)


def test_a_dropped_answer_was_executed(proxy: FaultyProxy, echo: Echo) -> None:
    proxy.inject(ConnectionFault(kind=ConnectionFaultKind.DROP_ANSWER, at=2))
    with connected(proxy) as client:
        assert asked(client, b"one\n") == b"one\n"
        assert asked(client, b"two\n") == b""
    assert (echo.lines, proxy.num_fired) == ([b"one\n", b"two\n"], 1)
    with connected(proxy) as client:
        assert asked(client, b"two\n") == b"two\n"


def test_an_answer_is_cut(proxy: FaultyProxy) -> None:
    proxy.inject(ConnectionFault(kind=ConnectionFaultKind.CUT_ANSWER, num_bytes=2))
    with connected(proxy) as client, client.makefile("rb") as file:
        client.sendall(b"one\n")
        assert file.read() == b"on"


def test_a_request_is_cut(proxy: FaultyProxy, echo: Echo) -> None:
    proxy.inject(ConnectionFault(kind=ConnectionFaultKind.CUT_REQUEST, at=2, num_bytes=1))
    with connected(proxy) as client:
        assert asked(client, b"one\n") == b"one\n"
        with suppress(ConnectionResetError):  # bytes that the proxy has not read turn the close into a reset
            assert asked(client, b"two\n") in (b"", b"t")
    assert b"two\n" not in echo.lines


def test_a_reset_reaches_both_sides(proxy: FaultyProxy, echo: Echo) -> None:
    proxy.inject(ConnectionFault(kind=ConnectionFaultKind.RESET))
    with connected(proxy) as client:
        if client.family == socket.AF_UNIX:
            assert asked(client, b"one\n") == b""
            return
        with pytest.raises(ConnectionResetError):
            asked(client, b"one\n")
        assert echo.is_reset.wait(TIMEOUT_S)


def test_silence_keeps_the_connection(proxy: FaultyProxy, echo: Echo) -> None:
    proxy.inject(ConnectionFault(kind=ConnectionFaultKind.SILENCE))
    with connected(proxy) as client, connected(proxy) as other:
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            asked(client, b"one\n")
        assert asked(other, b"two\n") == b"two\n"
        proxy.heal()
        client.settimeout(TIMEOUT_S)
        assert client.recv(10) == b""
    assert echo.lines == [b"one\n", b"two\n"]


def test_answers_are_delayed_until_it_heals(proxy: FaultyProxy) -> None:
    proxy.inject(ConnectionFault(kind=ConnectionFaultKind.DELAY, delay_s=0.05))
    with connected(proxy) as client:
        start_s = time.monotonic()
        assert asked(client, b"one\n") == b"one\n"
        assert asked(client, b"two\n") == b"two\n"
        assert time.monotonic() - start_s >= 0.1
        proxy.inject(ConnectionFault(kind=ConnectionFaultKind.DELAY, delay_s=1000.0))
        proxy.heal()
        assert asked(client, b"three\n") == b"three\n"


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with FaultyProxy(f"unix://{tmp_path / 'none'}") as proxy:
        with connected(proxy) as client, suppress(ConnectionResetError, BrokenPipeError):
            assert asked(client, b"one\n") == b""


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at >= 1"):
        ConnectionFault(kind=ConnectionFaultKind.RESET, at=0)
    with pytest.raises(ValueError, match="expected unix://PATH"):
        FaultyProxy("redis:///nowhere")
