"""A local S3 server, moto's, and a proxy before it that is slow, cuts connections and answers 500."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from moto.server import ThreadedMotoServer

__all__ = ["Proxy", "s3_server", "use_server"]

#: Takes the number of a request, its method and its path; the name of its fault, or an empty text.
Faults = Callable[[int, str, str], str]


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that is empty."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use_server(address: str, monkeypatch: pytest.MonkeyPatch, **others: str) -> Mapping[str, str]:
    """Let the clients of this process, and of those that it starts, use a server; returns the variables."""
    variables = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        **others,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


class Proxy:
    """Forwards requests to a server, with faults. Used with `with`.

    Args:
        target: address of the server.
        faults: the fault of each request: `500`, `cut` (the connection ends in the middle of the body), `slow` (the
            body comes in pieces), or none.

    Attributes:
        address: of the proxy.
        requests: method and path of each request.
        injected: faults so far.
    """

    def __init__(self, target: str, faults: Faults = lambda number, method, path: "") -> None:
        self.requests: list[tuple[str, str]] = []
        self.injected: list[str] = []
        self.faults = faults
        self._target = target.removeprefix("http://")
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _serve(self) -> None:
                proxy._serve(self)

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._serve)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = self._body_of(handler)
        with self._lock:
            number = len(self.requests)
            self.requests.append((handler.command, handler.path))
        fault = self.faults(number, handler.command, handler.path)
        if fault:
            self.injected.append(fault)
        if fault == "500":
            handler.send_response(500)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        connection = http.client.HTTPConnection(self._target)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "transfer-encoding"}
        connection.request(handler.command, handler.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                handler.send_header(name, value)
        if answer.getheader("Content-Length") is None:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        half = len(content) // 2
        handler.wfile.write(content[:half])
        handler.wfile.flush()
        if fault == "cut":
            handler.close_connection = True
            return
        if fault == "slow":
            threading.Event().wait(0.2)
        handler.wfile.write(content[half:])

    @staticmethod
    def _body_of(handler: BaseHTTPRequestHandler) -> bytes | None:
        length = handler.headers.get("Content-Length")
        if length is not None:
            return handler.rfile.read(int(length))
        if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return None
        parts = []
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            parts.append(handler.rfile.read(size))
            handler.rfile.readline()
        handler.rfile.readline()
        return b"".join(parts)
