"""`FaultyProxy`: a proxy on a real connection between client and server that injects faults on command.

    client ──requests──> proxy ──requests──> server
           <──answers──        <──answers──            one thread each way

An *answer* is everything that the server sends between two sends of the client, so an exchange of many pipelined
commands has one answer. The proxy understands no protocol: a dropped answer belongs to executed commands, a cut request
was half sent.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit

__all__ = ["ConnectionFault", "ConnectionFaultKind", "FaultyProxy"]

_CHUNK_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0
#: A pump thread that does not end is a bug of the proxy.
_JOIN_TIMEOUT_S = 20.0


class ConnectionFaultKind(Enum):
    """Kinds of faults."""

    #: The answer is dropped, then the connection closed: the commands are executed, but the client cannot know.
    DROP_ANSWER = "drop-answer"
    #: Only the first bytes of the answer arrive, then the connection is closed.
    CUT_ANSWER = "cut-answer"
    #: Only the first bytes of the request arrive, then the connection is closed.
    CUT_REQUEST = "cut-request"
    #: Both sides see a connection reset (RST) instead of the answer; on a unix socket, a close.
    RESET = "reset"
    #: The answer is dropped and the connection stays open without another byte in either direction.
    SILENCE = "silence"
    #: This answer and all later ones are delayed until `heal`.
    DELAY = "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFault:
    """One fault, injected once.

    Attributes:
        kind: see `ConnectionFaultKind`.
        at: number of the answer (request, for CUT_REQUEST), counted from 1 over all connections from now on.
        num_bytes: bytes that a cut lets through.
        delay_s: delay of every answer, for DELAY.
    """

    kind: ConnectionFaultKind
    at: int = 1
    num_bytes: int = 0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.at < 1 or self.num_bytes < 0 or self.delay_s < 0:
            raise ValueError(f"expected at >= 1, num_bytes >= 0 and delay_s >= 0, got {self}")


class _Pair:
    """A client's connection and the matching connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.is_silent = threading.Event()
        #: The last byte came from the client, so the next byte of the server begins an answer.
        self.is_asked = False
        #: Pending faults of the answer (request) in transit.
        self.answer: ConnectionFault | None = None
        self.request: ConnectionFault | None = None
        self.num_pumps = 2
        self.is_reset = False

    def close(self, *, reset: bool = False) -> None:
        """Wake both threads. The last one to leave closes the connections, with a reset if requested."""
        self.is_reset = self.is_reset or reset
        for end in (self.client, self.server):
            with suppress(OSError):
                if self.is_reset and end.family != socket.AF_UNIX:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # sends nothing
                else:
                    end.shutdown(socket.SHUT_RDWR)


class FaultyProxy:
    """Context manager. Thread-safe.

    Args:
        upstream: URL of the server, ``unix://PATH`` or ``SCHEME://HOST:PORT``; it need not run yet, and can restart.
        listen: path of a unix socket to listen on; None: any port of 127.0.0.1.
    """

    def __init__(self, upstream: str, *, listen: Path | None = None) -> None:
        scheme = upstream.partition("://")[0]
        self._scheme = "redis" if scheme == "unix" else scheme
        self._connect = _connector(upstream)
        self._path = listen
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._faults: list[ConnectionFault] = []
        self._num_requests = 0
        self._num_answers = 0
        self._num_fired = 0
        self._delay_s = 0.0
        self._healed = threading.Event()
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    @property
    def url(self) -> str:
        """URL of the proxy, once entered."""
        assert self._listener is not None, "the proxy is not running"
        if self._path is not None:
            return f"unix://{quote(str(self._path))}"
        host, port = self._listener.getsockname()
        return f"{self._scheme}://{host}:{port}"

    @property
    def num_answers(self) -> int:
        """Number of answers so far."""
        return self._num_answers

    @property
    def num_fired(self) -> int:
        """Number of injected faults."""
        return self._num_fired

    def __enter__(self) -> Self:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self._path))
        else:
            self._listener = socket.socket(socket.AF_INET)
            self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self._begin(self._accept, "accept")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._listener is not None
        with self._lock:
            self._is_closing = True
            pairs = list(self._pairs)
        self._healed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        for pair in pairs:
            pair.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} does not end"
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def inject(self, fault: ConnectionFault) -> None:
        """Inject the fault at its answer (request), counted from now on."""
        with self._lock:
            base = self._num_requests if fault.kind is ConnectionFaultKind.CUT_REQUEST else self._num_answers
            due = ConnectionFault(kind=fault.kind, at=base + fault.at, num_bytes=fault.num_bytes, delay_s=fault.delay_s)
            self._faults.append(due)
            self._healed.clear()

    def heal(self) -> None:
        """Cancel pending faults, end delays, and close silent connections."""
        with self._lock:
            self._faults.clear()
            self._delay_s = 0.0
            silent = [pair for pair in self._pairs if pair.is_silent.is_set()]
            self._healed.set()
        for pair in silent:
            pair.close()

    def _begin(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=f"bagpipe-proxy-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:  # as if the server itself had refused
                client.close()
                continue
            pair = _Pair(client, server)
            with self._lock:
                if self._is_closing:
                    client.close()
                    server.close()
                    return
                self._pairs.append(pair)
            self._begin(partial(self._pump, pair, self._pass_requests), "requests")
            self._begin(partial(self._pump, pair, self._pass_answers), "answers")

    def _pump(self, pair: _Pair, work: Callable[[_Pair], None]) -> None:
        with suppress(OSError):
            work(pair)
        if not pair.is_silent.is_set():
            pair.close()
        with self._lock:
            pair.num_pumps -= 1
            is_last = pair.num_pumps == 0
            if is_last:
                self._pairs.remove(pair)
        if is_last:
            pair.client.close()
            pair.server.close()

    def _pass_requests(self, pair: _Pair) -> None:
        while data := pair.client.recv(_CHUNK_BYTES):
            with self._lock:
                if not pair.is_asked:
                    pair.is_asked = True
                    self._num_requests += 1
                    pair.request = self._take(self._num_requests, of_requests=True)
            if pair.is_silent.is_set():
                continue
            if pair.request is not None:
                pair.server.sendall(data[: pair.request.num_bytes])
                return
            pair.server.sendall(data)

    def _pass_answers(self, pair: _Pair) -> None:
        while data := pair.server.recv(_CHUNK_BYTES):
            with self._lock:
                if pair.is_asked:
                    pair.is_asked = False
                    self._num_answers += 1
                    pair.answer = self._take(self._num_answers, of_requests=False)
                fault = pair.answer
                if fault is not None and fault.kind is ConnectionFaultKind.DELAY:
                    self._delay_s = fault.delay_s
                delay_s = self._delay_s
            if delay_s:
                self._healed.wait(delay_s)
            if pair.is_silent.is_set():
                continue
            if fault is None or fault.kind is ConnectionFaultKind.DELAY:
                pair.client.sendall(data)
            elif fault.kind is ConnectionFaultKind.SILENCE:
                pair.is_silent.set()
            elif fault.kind is ConnectionFaultKind.RESET:
                pair.close(reset=True)
                return
            else:
                if fault.kind is ConnectionFaultKind.CUT_ANSWER:
                    pair.client.sendall(data[: fault.num_bytes])
                return

    def _take(self, number: int, *, of_requests: bool) -> ConnectionFault | None:
        """The fault due at this answer (request). The caller holds the lock."""
        for fault in self._faults:
            if fault.at <= number and (fault.kind is ConnectionFaultKind.CUT_REQUEST) == of_requests:
                self._faults.remove(fault)
                self._num_fired += 1
                return fault
        return None


def _connector(upstream: str) -> Callable[[], socket.socket]:
    parts = urlsplit(upstream)
    if parts.scheme == "unix":
        path = unquote(parts.path)

        def connect_unix() -> socket.socket:
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(path)
            except OSError:
                server.close()
                raise
            return server

        return connect_unix
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"expected unix://PATH or SCHEME://HOST:PORT, got {upstream!r}")
    address = (parts.hostname, parts.port)

    def connect_tcp() -> socket.socket:
        server = socket.create_connection(address, _CONNECT_TIMEOUT_S)
        server.settimeout(None)
        return server

    return connect_tcp
