"""A certificate authority for tests, and a TLS server on any machine.

Authority ──openssl──> ca.pem, and certificates for localhost
start_tls_server: a server that speaks TLS itself where the installed one can; else one behind `TlsFront`
"""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from tests.store.nodes import start_server

__all__ = ["Authority", "Certificate", "TlsFront", "serves_tls", "start_tls_server", "tls_options"]

_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority in a folder of its own.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._own = Certificate(certificate=folder / "ca.pem", key=folder / "ca.key")
        _openssl(
            "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", "/CN=test authority",
            "-keyout", self._own.key, "-out", self._own.certificate,
        )  # fmt: skip

    @property
    def certificate(self) -> Path:
        """File to name as ssl_ca_certs."""
        return self._own.certificate

    def issue(self, name: str, *, is_expired: bool = False) -> Certificate:
        """A certificate for localhost and 127.0.0.1."""
        files = Certificate(certificate=self._folder / f"{name}.pem", key=self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / "names.ext"
        extensions.write_text(_NAMES)
        _openssl("req", *_NEW_KEY, "-subj", "/CN=localhost", "-keyout", files.key, "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self._own.certificate, "-CAkey", self._own.key, "-CAcreateserial",
            "-days", "-1" if is_expired else "2", "-extfile", extensions, "-out", files.certificate,
        )  # fmt: skip
        return files


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=250)


def serves_tls(folder: Path, certificate: Certificate) -> bool:
    """Whether the installed server supports TLS."""
    try:
        with ExitStack() as stack:
            start_server(stack, folder, ("tls-port",), tls_options(certificate))
    except InputError:
        return False
    return True


def tls_options(certificate: Certificate) -> dict[str, str]:
    """Options of a server with native TLS."""
    return {
        "tls-cert-file": str(certificate.certificate),
        "tls-key-file": str(certificate.key),
        "tls-ca-cert-file": str(certificate.certificate),
        "tls-auth-clients": "no",
    }


@contextmanager
def start_tls_server(
    folder: Path, certificate: Certificate, *, is_native: bool
) -> Iterator[tuple[EmbeddedServer, int]]:
    """A server and its TLS port on 127.0.0.1, either native or of a `TlsFront`."""
    with ExitStack() as stack:
        if is_native:
            server, (port,), _ = start_server(stack, folder, ("tls-port",), tls_options(certificate))
        else:
            server = stack.enter_context(EmbeddedServer(folder))
            port = stack.enter_context(TlsFront(certificate, server.url.removeprefix("unix://"))).port
        yield server, port


class TlsFront:
    """TLS-terminating proxy of a server on a unix socket. Context manager; one thread per connection."""

    def __init__(self, certificate: Certificate, path: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.certificate, certificate.key)
        self._path = path
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._stop, self._stopped = socket.socketpair()
        self._stack.enter_context(self._stop)
        self._stack.enter_context(self._stopped)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.send(b".")
        self._acceptor.join()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()
        self._stack.close()

    def _accept(self) -> None:
        while self._stopped not in select.select([self._listener, self._stopped], [], [])[0]:
            raw = self._listener.accept()[0]
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                outer = self._context.wrap_socket(raw, server_side=True)
            except OSError:  # a client that rejects the certificate or uses no TLS
                raw.close()
                continue
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                plain.connect(self._path)
            except OSError:  # the server has gone away
                plain.close()
                outer.close()
                continue
            self._sockets += [plain, outer]
            self._threads.append(threading.Thread(target=_pump, args=(outer, plain)))
            self._threads[-1].start()


def _pump(outer: ssl.SSLSocket, plain: socket.socket) -> None:
    """Both directions in one thread: an SSL connection must not be read and written at once."""
    pairs = {outer: plain, plain: outer}
    with suppress(OSError):
        while True:
            for source in [outer] if outer.pending() else select.select([outer, plain], [], [])[0]:
                data = source.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                pairs[source].sendall(data)
    for sock in pairs:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
