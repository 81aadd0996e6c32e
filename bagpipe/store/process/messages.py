"""Messages between the training process and the process of its store's client, over a pair of sockets.

    request   kind, number, region, size            reply   status, number of the request, statistics │ error

Everything else lies in the region of shared memory that the request names (`bagpipe.store.process.region`).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

from bagpipe import errors
from bagpipe.errors import StoreError
from bagpipe.store.interface import StoreStatistics
from bagpipe.util.documents import parse_json

__all__ = ["COUNTS", "Kind", "Reply", "Request", "decode_error", "encode_error", "receive", "socket_pair"]

#: Longer texts are cut: one message crosses as one packet.
_MAX_TEXT_BYTES = 64 << 10
_REQUEST = struct.Struct("<BxHIQ")
#: Names of the numbers of `StoreStatistics`, in the order of a reply.
COUNTS = tuple(field.name for field in fields(StoreStatistics))
_REPLY = struct.Struct(f"<BI{len(COUNTS)}q")
_DONE, _FAILED = 0, 1
#: Errors that cross by name, a subclass as its base. Any other becomes a `StoreError` that names its class.
_ERRORS: dict[str, type[Exception]] = {
    **{name: kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)},
    **{kind.__name__: kind for kind in (ValueError, RuntimeError, MemoryError)},
}


class Kind(IntEnum):
    """What is asked for; in the region are …"""

    OPEN = 0  # the store's arguments as JSON, of `size` bytes
    READ = 1  # `size` entries and their ids; the rows come there
    WRITE = 2  # `size` entries, ids and rows
    DELETE = 3  # `size` entries and ids
    FENCE = 4  # the fence as JSON, of `size` bytes
    ROTATE = 5  # nothing; an int64 for each bucket comes there
    SUMS = 6  # nothing; a uint64 for each bucket comes there
    NOTHING = 7  # answered after all requests before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request.

    Attributes:
        kind: what is asked for.
        number: of the request, modulo 2**32; the reply has the same.
        region: number of the region.
        size: see `Kind`.
    """

    kind: Kind
    number: int
    region: int = 0
    size: int = 0

    def encode(self) -> bytes:
        return _REQUEST.pack(self.kind, self.region, self.number, self.size)

    @classmethod
    def decode(cls, packet: bytes) -> Request:
        kind, region, number, size = _REQUEST.unpack(packet)
        return cls(kind=Kind(kind), number=number, region=region, size=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply.

    Attributes:
        number: of the request.
        statistics: of the store when the reply was made.
        error: of the request; None: it is done.
    """

    number: int
    statistics: StoreStatistics
    error: Exception | None = None

    def encode(self) -> bytes:
        status, text = (_DONE, b"") if self.error is None else (_FAILED, encode_error(self.error))
        return _REPLY.pack(status, self.number, *astuple(self.statistics)) + text

    @classmethod
    def decode(cls, packet: bytes) -> Reply:
        status, number, *counts = _REPLY.unpack_from(packet)
        statistics = StoreStatistics(**dict(zip(COUNTS, counts, strict=True)))
        error = decode_error(packet[_REPLY.size :]) if status == _FAILED else None
        return cls(number=number, statistics=statistics, error=error)


def encode_error(error: Exception) -> bytes:
    """An error as JSON: class, message and notes."""
    message = str(error)
    known = next((kind for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind), None)
    if known is None:
        known, message = StoreError, f"the store's process failed: {type(error).__name__}: {message}"
    notes: Sequence[str] = getattr(error, "__notes__", ())
    cut = _MAX_TEXT_BYTES // 8  # a character is at most 6 bytes of JSON
    return json.dumps([known.__name__, message[:cut], [note[: cut // 8] for note in notes[:4]]]).encode()


def decode_error(text: bytes) -> Exception:
    """The error of `encode_error`."""
    name, message, notes = parse_json(text)
    error = _ERRORS[name](message)
    for note in notes:
        error.add_note(note)
    return error


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets that keep the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive(end: socket.socket) -> bytes:
    """The next message; empty: the other end is closed."""
    try:
        return end.recv(2 * _MAX_TEXT_BYTES)
    except ConnectionResetError:  # the other process was killed with a message in its queue
        return b""
