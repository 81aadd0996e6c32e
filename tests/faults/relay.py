"""`Relay`: a proxy between a client and its server that alters the server's answers."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from tests.relays import OnReadable, SocketRelay, close_pair

__all__ = ["Relay"]

Alteration = Callable[[bytes], bytes]


class Relay(SocketRelay):
    """Listens on a unix socket. An answer must fit into a socket buffer, about 100 KiB.

    Args:
        url: unix:// URL of the server.
        folder: for the relay's own socket.
    """

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder / "relay.sock", Path(unquote(url.removeprefix("unix://"))))
        self._change: Alteration | None = None

    @property
    def url(self) -> str:
        """URL of the relay."""
        return f"unix://{quote(str(self._path))}"

    def alter(self, change: Alteration) -> None:
        """Replace the next answer by `change(answer)`; an empty result closes the connection."""
        self._change = change

    def _handlers(self, ours: socket.socket, theirs: socket.socket) -> tuple[OnReadable, OnReadable]:
        return (
            lambda selector: self._forward(selector, ours, theirs, False),
            lambda selector: self._forward(selector, theirs, ours, True),
        )

    def _forward(
        self, selector: selectors.BaseSelector, source: socket.socket, sink: socket.socket, is_answer: bool
    ) -> None:
        with suppress(OSError):
            data = source.recv(1 << 18)
            if data and is_answer and self._change is not None:
                alter, self._change = self._change, None
                data = alter(data)
            if data:
                sink.sendall(data)
                return
        close_pair(selector, source, sink)
