"""Rows of one width on their way: routed rows to frames of requests for one link, replies back into place.

    commands ──runs of about 32 KiB──> encode a run at once ──> a frame of requests
    reply ──HmgetDecoder──> rows[order[start:stop]] = found rows

A frame is encoded only when the one before has left, into the same scratch array, while the server is still at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.exchange import Frame, Request
from bagpipe.store.link import Bytes
from bagpipe.store.routing import Command, RoutedRows
from bagpipe.store.wire import FieldEncoder, HmgetDecoder, RowEncoder, decode_hset, hmget_header, hset_header

__all__ = ["Codec", "Group", "ReadCodec", "ReadGroup", "WriteCodec", "WriteGroup", "max_command_rows"]

#: Bytes of rows in one command: bounds a reply, the receive buffer and how long the server is busy with one command.
_COMMAND_BYTES = 64 << 10
#: Bytes encoded at a time: small enough that the first ones leave early and all stay in a core's cache, large enough
#: that the server is rarely idle and woken again. 32 KiB was the best of 16, 32, 64 and 128 in benchmarks/store.
_FRAME_BYTES = 32 << 10
_HSET_REPLY_BYTES = 24


def max_command_rows(row_bytes: int) -> int:
    """Rows of one command, at most."""
    return max(1, _COMMAND_BYTES // row_bytes)


class Group(Protocol):
    """Rows of one width: where they go, and a void element ``[n]`` for each in request order."""

    @property
    def routed(self) -> RoutedRows: ...

    @property
    def rows(self) -> NDArray[np.void]: ...


G = TypeVar("G", bound=Group, contravariant=True)


class Codec(Protocol[G]):
    """Makes the requests of one link. Its scratch arrays hold one frame at a time."""

    def frames(self, group: G, commands: Iterable[Command]) -> Iterator[Frame]:
        """Requests for `commands` of a group, one each, in their order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadGroup:
    """Rows of one width to be read.

    Attributes:
        routed: what to ask for.
        rows: void ``[n]``, filled in request order; untouched where a row is missing.
        found: bool ``[n]``, True at first; set False where a row is missing.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    found: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteGroup:
    """Rows of one width to be written: void ``[n]`` in request order."""

    routed: RoutedRows
    rows: NDArray[np.void]


class ReadCodec:
    """HMGET requests whose replies fill a `ReadGroup`.

    Args:
        keys: key of each bucket.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._encoder = FieldEncoder()
        self._decoders: dict[int, HmgetDecoder] = {}

    def frames(self, group: ReadGroup, commands: Iterable[Command]) -> Iterator[Frame]:
        """See `Codec.frames`."""
        routed, row_bytes = group.routed, group.rows.itemsize
        decoder = self._decoders.setdefault(row_bytes, HmgetDecoder(row_bytes))
        record_bytes = self._encoder.record_bytes
        for run in _runs(commands, record_bytes):
            first_row = run[0].start
            order = routed.order[first_row : run[-1].stop]
            data = self._encoder.encode(routed.tables.take(order), routed.ids.take(order)).data
            requests = []
            for command in run:
                num_rows = command.stop - command.start
                head = memoryview(hmget_header(self._keys[command.bucket], num_rows))
                body = _slice(data, command, first_row, record_bytes)
                accept = partial(_accept_rows, decoder, group, command)
                requests.append(Request(head, body, decoder.max_reply_bytes(num_rows), accept))
            yield requests


class WriteCodec:
    """HSET requests with the rows of a `WriteGroup`.

    Args:
        keys: key of each bucket.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._encoders: dict[int, RowEncoder] = {}

    def frames(self, group: WriteGroup, commands: Iterable[Command]) -> Iterator[Frame]:
        """See `Codec.frames`."""
        routed, row_bytes = group.routed, group.rows.itemsize
        encoder = self._encoders.setdefault(row_bytes, RowEncoder(row_bytes))
        for run in _runs(commands, encoder.record_bytes):
            first_row = run[0].start
            order = routed.order[first_row : run[-1].stop]
            data = encoder.encode(routed.tables.take(order), routed.ids.take(order), group.rows.take(order)).data
            requests = []
            for command in run:
                num_rows = command.stop - command.start
                head = memoryview(hset_header(self._keys[command.bucket], num_rows))
                body = _slice(data, command, first_row, encoder.record_bytes)
                requests.append(Request(head, body, _HSET_REPLY_BYTES, partial(decode_hset, num_rows=num_rows)))
            yield requests


def _accept_rows(
    decoder: HmgetDecoder, group: ReadGroup, command: Command, buffer: Bytes, start: int, end: int
) -> int | None:
    """Put one reply's rows where they belong; offset after the reply, or None while it is incomplete."""
    reply = decoder.decode(buffer, start, end, command.stop - command.start)
    if reply is None:
        return None
    places = group.routed.order[command.start : command.stop]
    if reply.found is not None:
        group.found[places] = reply.found
        places = places[reply.found]
    group.rows[places] = reply.rows
    return reply.end


def _runs(commands: Iterable[Command], record_bytes: int) -> Iterator[list[Command]]:
    """Group commands whose rows follow each other into runs of about `_FRAME_BYTES`, at least one command each."""
    run: list[Command] = []
    for command in commands:
        if run and command.start != run[-1].stop:
            yield run
            run = []
        run.append(command)
        if (command.stop - run[0].start) * record_bytes >= _FRAME_BYTES:
            yield run
            run = []
    if run:
        yield run


def _slice(data: memoryview, command: Command, first_row: int, record_bytes: int) -> memoryview:
    return data[(command.start - first_row) * record_bytes : (command.stop - first_row) * record_bytes]
