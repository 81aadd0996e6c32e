"""A server that answers one command as no server should, and the others as an empty one."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["MISBEHAVIOURS", "hostile_server"]

Misbehaviour = Callable[[socket.socket], None]

#: Between two bytes of a server that drips: many within any deadline of a test.
_DRIP_S = 0.02
_CHUNK = 1 << 16


def answer(data: bytes) -> Misbehaviour:
    """These bytes."""
    return lambda sock: sock.sendall(data)


def answer_and_close(data: bytes) -> Misbehaviour:
    """These bytes, and the end of the connection."""

    def run(sock: socket.socket) -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_RDWR)

    return run


def stream(start: bytes, chunk: bytes) -> Misbehaviour:
    """`start`, then `chunk` again and again until the client has enough."""

    def run(sock: socket.socket) -> None:
        sock.sendall(start)
        while True:
            sock.sendall(chunk)

    return run


def drip(start: bytes, chunk: bytes) -> Misbehaviour:
    """As `stream`, slowly."""

    def run(sock: socket.socket) -> None:
        sock.sendall(start)
        while True:
            sock.sendall(chunk)
            threading.Event().wait(_DRIP_S)

    return run


def reset(sock: socket.socket) -> None:
    """The end of the connection, with what is unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.shutdown(socket.SHUT_RDWR)


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


DIGITS = b"9" * 5000

MISBEHAVIOURS: Mapping[str, Misbehaviour] = {
    "a bulk that drips": drip(b"$1000000\r\n", b"x"),
    "a line that drips": drip(b"+", b"x"),
    "an error line that drips": drip(b"-ERR ", b"x"),
    "elements that drip": drip(b"*1000000\r\n", b":1\r\n"),
    "a line without end": stream(b"+", b"x" * _CHUNK),
    "an error line without end": stream(b"-", b"x" * _CHUNK),
    "a bulk of a terabyte": stream(b"$1099511627776\r\n", b"x" * _CHUNK),
    "a bulk of a terabyte, then silence": answer(b"$1099511627776\r\n"),
    "an array of 2**31, then silence": answer(b"*2147483648\r\n"),
    "an array of 2**31 numbers": stream(b"*2147483648\r\n", b":1\r\n" * 10_000),
    "an array of 2**31 texts": stream(b"*2147483648\r\n", b"$1\r\na\r\n" * 10_000),
    "an array of 2**31 nothings": stream(b"*2147483648\r\n", b"$-1\r\n" * 10_000),
    "100,000 arrays in each other": answer(b"*1\r\n" * 100_000),
    "arrays in each other without end": stream(b"", b"*1\r\n" * 10_000),
    "silence": answer(b""),
    "the end of the connection": answer_and_close(b""),
    "a reset": reset,
    "half a bulk": answer_and_close(b"$100\r\nabc"),
    "half an array": answer_and_close(b"*3\r\n:1\r\n"),
    "a number with two signs": answer(b":--5\r\n"),
    "a number of 5,000 digits": answer(b":" + DIGITS + b"\r\n"),
    "a length with two signs": answer(b"$--5\r\n"),
    "a length of 5,000 digits": answer(b"$" + DIGITS + b"\r\n"),
    "a count of 5,000 digits": answer(b"*" + DIGITS + b"\r\n"),
    "a count with two signs": answer(b"*--5\r\n"),
    "a length of -5": answer(b"$-5\r\n"),
    "a count of -5": answer(b"*-5\r\n"),
    "no length": answer(b"$\r\n"),
    "bytes": answer(bytes(range(256))),
    "HTTP": answer_and_close(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "empty lines": answer(b"\r\n\r\n"),
    "a number": answer(b":7\r\n"),
    "a negative number": answer(b":-7\r\n"),
    "a status": answer(b"+OK\r\n"),
    "a text": answer(bulk(b"abc")),
    "an empty text": answer(bulk(b"")),
    "nothing": answer(b"$-1\r\n"),
    "no array": answer(b"*-1\r\n"),
    "numbers": answer(b"*2\r\n:1\r\n:2\r\n"),
    "an odd number of texts": answer(b"*3\r\n" + bulk(b"a") * 3),
    "texts in arrays": answer(b"*1\r\n*1\r\n" + bulk(b"a")),
    "texts that are no UTF-8": answer(b"*4\r\n" + bulk(b"\xff\xfe") * 4),
    "texts and numbers": answer(b"*5\r\n" + bulk(b"a") * 2 + b":1\r\n" + bulk(b"no log") + b":1\r\n"),
    "an error in an array": answer(b"*2\r\n-ERR no\r\n:1\r\n"),
    "an error": answer(b"-ERR \x1b[31mno\r\n"),
    "an error of 70,000 bytes": answer(b"-ERR " + b"x" * 70_000 + b"\r\n"),
    "a redirection": answer(b"-MOVED 1 nowhere:1\r\n"),
    "two replies": answer(b":1\r\n:1\r\n"),
    "a scan that does not end": answer(b"*2\r\n" + bulk(b"7") + b"*0\r\n"),
    "a scan of fields without end": answer(b"*2\r\n" + bulk(b"7") + b"*400\r\n" + bulk(b"x" * 12) * 400),
    "a map of RESP3": answer(b"%1\r\n+a\r\n:1\r\n"),
    "nothing of RESP3": answer(b"_\r\n"),
    "a bulk without line end": answer(b"$3\r\nabcxx"),
}

INFO = b"redis_version:7.2.0\r\nrun_id:0\r\nrole:master\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"

#: Answers of an empty server. A script's is found by its text.
ANSWERS: Mapping[bytes, bytes] = {
    b"PING": b"+PONG\r\n",
    b"INFO": bulk(INFO),
    b"HGETALL": b"*0\r\n",
    b"EXISTS": b":0\r\n",
    b"HLEN": b":0\r\n",
    b"HSCAN": b"*2\r\n" + bulk(b"0") + b"*0\r\n",
    b"GET": b"$-1\r\n",
    b"EXEC": b"*1\r\n:1\r\n",
}


def _answer_of(words: list[bytes]) -> bytes:
    name = words[0].upper()
    if name == b"HMGET":
        return b"*%d\r\n" % (len(words) - 2) + b"$-1\r\n" * (len(words) - 2)
    if name == b"HSET":
        return b":1\r\n"
    if name == b"EVAL" and b"acl_check_cmd" in words[1]:
        return b"*0\r\n"
    if name == b"EVAL" and b"table.insert" in words[1]:
        return b"*3\r\n" + bulk(b"") * 2 + b":0\r\n"
    if name == b"EVAL":
        return bulk(b"OK")
    return ANSWERS.get(name, b"+OK\r\n")


class _Handler(socketserver.StreamRequestHandler):
    """Answers one connection."""

    server: _Server

    def handle(self) -> None:
        with suppress(OSError, ValueError):
            while words := self._request():
                if words[0].upper() == self.server.command:
                    self.server.misbehave(self.request)
                else:
                    self.request.sendall(_answer_of(words))

    def _request(self) -> list[bytes]:
        header = self.rfile.readline()
        if not header:
            return []
        words = []
        for _ in range(int(header[1:])):
            length = int(self.rfile.readline()[1:])
            words.append(self.rfile.read(length + 2)[:-2])
        return words


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, path: str, command: bytes, misbehave: Misbehaviour) -> None:
        self.command = command
        self.misbehave = misbehave
        super().__init__(path, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has ended the connection."""


@contextmanager
def hostile_server(folder: Path, command: str, misbehaviour: str) -> Iterator[str]:
    """URL of a server that answers `command` by a misbehaviour of `MISBEHAVIOURS`."""
    path = folder / "hostile.sock"
    with _Server(str(path), command.encode(), MISBEHAVIOURS[misbehaviour]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"unix://{path}"
        finally:
            server.shutdown()
            thread.join()
            path.unlink()
