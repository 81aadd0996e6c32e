"""`SocketRelay`: a relay between a client and its server on unix sockets. Subclasses define what it forwards."""

from __future__ import annotations

import abc
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

__all__ = ["SocketRelay", "close_pair"]

#: Called when a socket becomes readable.
OnReadable = Callable[[selectors.BaseSelector], None]


class SocketRelay(abc.ABC):
    """Context manager; serves in its own thread.

    Args:
        path: of the unix socket it listens on.
        target: path of the server's socket.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target

    def __enter__(self) -> Self:
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
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector, stack)
                    elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr] # a socket
                        key.data(selector)

    def _accept(self, selector: selectors.BaseSelector, stack: ExitStack) -> None:
        ours = stack.enter_context(self._listener.accept()[0])
        theirs = stack.enter_context(socket.socket(socket.AF_UNIX))
        on_request, on_answer = self._handlers(ours, theirs)
        try:
            theirs.connect(str(self._target))
        except OSError:
            ours.close()
            return
        selector.register(ours, selectors.EVENT_READ, on_request)
        selector.register(theirs, selectors.EVENT_READ, on_answer)

    @abc.abstractmethod
    def _handlers(self, ours: socket.socket, theirs: socket.socket) -> tuple[OnReadable, OnReadable]:
        """Callbacks of one connection: for bytes from the client, and from the server."""


def close_pair(selector: selectors.BaseSelector, *ends: socket.socket) -> None:
    """Close both ends of a connection."""
    for end in ends:
        with suppress(KeyError, ValueError):
            selector.unregister(end)
        end.close()
