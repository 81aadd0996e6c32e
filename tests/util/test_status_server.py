"""The HTTP server of a process, with pages of its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from bagpipe.errors import InputError
from bagpipe.util.status_server import StatusServer


def metrics(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"up 1\n"]


def health(query):
    return "ill" not in query, {"asked": query}


def ask(server: StatusServer, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{server.port}{path}", timeout=250) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_its_pages(listen, host):
    server = StatusServer(listen, 0, metrics=metrics, pages={"/healthz": health}, subject="--metrics")
    try:
        assert ask(server, "/metrics?x=1", host) == (200, "up 1\n")
        assert [ask(server, path, host)[0] for path in ("/healthz", "/healthz?ill=1", "/", "/healthz/")] == [
            200,
            503,
            404,
            404,
        ]
        assert json.loads(ask(server, "/healthz?ill=1&n=2", host)[1]) == {"asked": {"ill": ["1"], "n": ["2"]}}
        assert json.loads(ask(server, "/x", host)[1]) == {"paths": ["/metrics", "/healthz"]}
        with pytest.raises(InputError, match=rf"^--metrics: cannot listen at {listen}:{server.port}: Address already"):
            StatusServer(listen, server.port, metrics=metrics, pages={}, subject="--metrics")
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        ask(server, "/metrics", host)
