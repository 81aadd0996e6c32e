"""`StatusServer`: the HTTP server of one process for scrapes and health probes. Threads of its own answer.

    GET /metrics    a WSGI application, as prometheus_client makes it
    GET /healthz    a function of the query: JSON, and whether all is well (200) or not (503)

Without authentication: it shows numbers, never data.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from bagpipe.errors import InputError

__all__ = ["Page", "StatusServer"]

#: Query -> whether all is well, and what is said.
Page = Callable[[Mapping[str, list[str]]], tuple[bool, Mapping[str, Any]]]


class StatusServer:
    """Listens from the start until `close`.

    Args:
        host, port: address; port 0: any.
        metrics: the WSGI application of ``/metrics``.
        pages: the other paths.
        subject: the setting that names the address, for errors.

    Attributes:
        port: the one that is listened on.

    Raises:
        InputError: cannot listen at the address.
    """

    def __init__(
        self, host: str, port: int, *, metrics: Callable[..., Any], pages: Mapping[str, Page], subject: str
    ) -> None:
        self._metrics = metrics
        self._pages = pages
        try:
            kind = _Server6 if ":" in host else _Server
            self._server = make_server(host, port, self._answer, kind, _Handler)
        except (OSError, OverflowError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InputError(f"{subject}: cannot listen at {host}:{port}: {text}") from None
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            exposition: Iterable[bytes] = self._metrics(environ, start_response)
            return exposition
        page = self._pages.get(path)
        if page is None:
            status, told = HTTPStatus.NOT_FOUND, {"paths": ["/metrics", *self._pages]}
        else:
            is_well, said = page(parse_qs(environ.get("QUERY_STRING", "")))
            status, told = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, dict(said)
        body = json.dumps(told).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [body]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a scrape is no news."""
