"""`Relay`: between a client and its server, passing on what the server answers as the test bends it."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

__all__ = ["Relay"]

Bend = Callable[[bytes], bytes]


class Relay:
    """Listens on a unix socket. An answer must fit into what a socket carries at once, some 100 KiB.

    Args:
        url: unix:// URL of the server.
        folder: for the relay's own socket.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._server = unquote(url.removeprefix("unix://"))
        self._path = folder / "relay.sock"
        self._bend: Bend | None = None

    @property
    def url(self) -> str:
        """Of the relay."""
        return f"unix://{quote(str(self._path))}"

    def bend(self, change: Bend) -> None:
        """Pass on the next answer as `change` makes it; one that is made empty ends the connection."""
        self._bend = change

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.send(b"x")
        self._thread.join()
        for end in (self._listener, self._wake, self._waker):
            end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, ExitStack() as stack:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector, stack)
                    elif key.data[0].fileno() >= 0:
                        self._forward(selector, *key.data)

    def _accept(self, selector: selectors.BaseSelector, stack: ExitStack) -> None:
        ours = stack.enter_context(self._listener.accept()[0])
        theirs = stack.enter_context(socket.socket(socket.AF_UNIX))
        theirs.connect(self._server)
        selector.register(ours, selectors.EVENT_READ, (ours, theirs, False))
        selector.register(theirs, selectors.EVENT_READ, (theirs, ours, True))

    def _forward(
        self, selector: selectors.BaseSelector, source: socket.socket, sink: socket.socket, is_answer: bool
    ) -> None:
        with suppress(OSError):
            data = source.recv(1 << 18)
            if data and is_answer and self._bend is not None:
                bend, self._bend = self._bend, None
                data = bend(data)
            if data:
                sink.sendall(data)
                return
        for end in (source, sink):
            with suppress(KeyError, ValueError):
                selector.unregister(end)
            end.close()
