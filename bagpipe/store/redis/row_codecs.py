"""`WriteCodec`: routed rows to frames of HSET requests for one link. `Codec`: what every codec does.

    commands ──runs of 32 to 512 KiB──> encode a run at once ──> a frame of requests

A frame is encoded only after the previous one was sent, into the same scratch array, while the server works.
Fenced writers send their runs as transactions of `bagpipe.store.redis.fenced_write`. Rows are read by
`bagpipe.store.redis.read_codec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import logs_key, open_key, owner_key
from bagpipe.store.fencing.writer_logs import LogEntries
from bagpipe.store.keys import FIELD_BYTES, FIELD_DTYPE
from bagpipe.store.redis.fenced_write import Rotation, Transaction
from bagpipe.store.redis.log_guard import GuardedCommand
from bagpipe.store.redis.request_pipeline import Frame, Request
from bagpipe.store.redis.resp_rows import (
    COUNT_REPLY_BYTES,
    CommandHeaders,
    RowEncoder,
    decode_count,
    decode_counts,
    hset_header,
)
from bagpipe.store.redis.routing import BucketCommand, RoutedRows
from bagpipe.util.failpoints import hit

__all__ = [
    "MAX_REQUEST_COMMANDS",
    "Codec",
    "Group",
    "LogRotation",
    "WriteCodec",
    "WriteGroup",
    "max_command_rows",
    "runs_of",
]

#: Bytes of rows per command. Bounds the reply, the receive buffer and the server's time per command.
_COMMAND_BYTES = 64 << 10
#: Bytes encoded first: few, so that the server begins early. Each later run takes twice as many, up to a bound: the
#: calls of numpy for a run cost as much as copying 100 rows.
_FIRST_BYTES = 32 << 10
_RUN_BYTES = 512 << 10
#: Keeps a request within its limit of 256 pieces.
MAX_REQUEST_COMMANDS = 100
_SHORT_BYTES = 2 << 10
#: Log rotations per frame.
_ROTATIONS = 256


def max_command_rows(row_bytes: int) -> int:
    """Maximum rows per command."""
    return max(1, _COMMAND_BYTES // row_bytes)


class Group(Protocol):
    """Rows of one width: their routing, and one void element per row, ``[n]``, in request order."""

    @property
    def routed(self) -> RoutedRows: ...

    @property
    def rows(self) -> NDArray[np.void]: ...


G = TypeVar("G", bound=Group, contravariant=True)
Piece: TypeAlias = bytes | memoryview


class Codec(Protocol[G]):
    """Encodes the requests of one link. Its scratch arrays hold one frame."""

    def frames(self, group: G, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        """Requests for `commands` of a group, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteGroup:
    """Rows of one width to be written.

    Attributes:
        routed: rows to send.
        rows: void ``[n]``, in request order.
        checks: uint64 ``[n]``, filled in request order with the check words that are sent.
        entries: log entries if fenced.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    checks: NDArray[np.uint64]
    entries: LogEntries | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogRotation:
    """Rotation of every bucket's log; one placeholder row per bucket.

    Attributes:
        entries: logs to close and their expected lengths.
        next_keys: keys of the logs to open, by bucket.
        next_name: name of these logs in the sets of logs.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    entries: LogEntries
    next_keys: Sequence[bytes]
    next_name: bytes


class WriteCodec:
    """HSET requests with the rows of a `WriteGroup`, in transactions if fenced; or a `LogRotation`.

    Args:
        keys: key of each bucket.
        max_request_commands: maximum HSETs per request; above 1 all buckets of a link must share a server.
    """

    def __init__(self, keys: Sequence[bytes], *, max_request_commands: int = MAX_REQUEST_COMMANDS) -> None:
        self._keys = keys
        self._open_keys = [open_key(key) for key in keys]
        self._headers = CommandHeaders(keys, hset_header)
        self._open_headers = CommandHeaders(self._open_keys, hset_header)
        self._max_request_commands = max_request_commands
        self._encoders: dict[int, RowEncoder] = {}

    def frames(self, group: WriteGroup | LogRotation, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        """See `Codec.frames`. One request per transaction if the group is fenced, else one for several commands."""
        if isinstance(group, LogRotation):
            return self._rotations(group, commands)
        if group.entries is None:
            return self._plain(group, commands)
        return self._guarded(group, group.entries, commands)

    def _plain(self, group: WriteGroup, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        encoder, at_once = self._encoder(group), self._max_request_commands
        for run in runs_of(commands, encoder.record_bytes, _FIRST_BYTES, _RUN_BYTES):
            _, bodies = self._encode(group, encoder, run)
            if at_once == 1:
                yield [self._single(command, body) for command, body in zip(run, bodies, strict=True)]
                hit("mid-write-back")
                continue
            requests = []
            for start in range(0, len(run), at_once):
                commands_of, pieces = run[start : start + at_once], list[Piece]()
                for (bucket, first, stop, _), body in zip(commands_of, bodies[start : start + at_once], strict=True):
                    pieces += (self._headers.of(bucket, stop - first), body)
                counts = [stop - first for _, first, stop, _ in commands_of]
                accept = partial(decode_counts, counts=counts)
                requests.append(Request(_joined(pieces), COUNT_REPLY_BYTES * len(counts), accept))
            yield requests
            hit("mid-write-back")

    def _single(self, command: BucketCommand, body: memoryview) -> Request:
        bucket, first, stop, _ = command
        header, accept = self._headers.of(bucket, stop - first), partial(decode_count, num_rows=stop - first)
        if len(body) < _SHORT_BYTES:
            return Request((memoryview(header + body),), COUNT_REPLY_BYTES, accept)
        return Request((memoryview(header), body), COUNT_REPLY_BYTES, accept)

    def _guarded(self, group: WriteGroup, entries: LogEntries, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        encoder, at_once = self._encoder(group), self._max_request_commands
        for run in runs_of(commands, encoder.record_bytes, _FIRST_BYTES, _RUN_BYTES):
            fields, bodies = self._encode(group, encoder, run)
            requests = []
            for start in range(0, len(run), at_once):
                stop = min(start + at_once, len(run))
                requests.append(self._transaction(entries, run[start:stop], fields[start:stop], bodies[start:stop]))
            yield requests
            hit("mid-write-back")

    def _transaction(
        self, entries: LogEntries, run: Sequence[BucketCommand], fields: Sequence[bytes], bodies: Sequence[memoryview]
    ) -> Request:
        commands = tuple(
            GuardedCommand(
                self._keys[bucket],
                self._open_keys[bucket],
                entries.keys[bucket],
                entries.lengths[bucket] + part,
                stop - start,
            )
            for bucket, start, stop, part in run
        )
        transaction = Transaction(token=entries.token, commands=commands)
        pieces: list[Piece] = [transaction.head(fields)]
        for (bucket, start, stop, _), body in zip(run, bodies, strict=True):
            pieces += (self._open_headers.of(bucket, stop - start), body)
        pieces.append(transaction.tail())
        return Request(_joined(pieces), transaction.max_reply_bytes, transaction.accept)

    def _rotations(self, group: LogRotation, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        for run in runs_of(commands, 1, _ROTATIONS, _ROTATIONS):
            requests = []
            for bucket, *_ in run:
                key = self._keys[bucket]
                rotation = Rotation(
                    token=group.entries.token,
                    bucket=key,
                    log=group.entries.keys[bucket],
                    length=group.entries.lengths[bucket],
                    next_log=group.next_keys[bucket],
                    next_name=group.next_name,
                    logs=logs_key(key),
                    owner=owner_key(key),
                )
                requests.append(Request((memoryview(rotation.encode()),), rotation.max_reply_bytes, rotation.accept))
            yield requests

    def _encoder(self, group: WriteGroup) -> RowEncoder:
        row_bytes = group.rows.itemsize
        if row_bytes not in self._encoders:
            self._encoders[row_bytes] = RowEncoder(row_bytes)
        return self._encoders[row_bytes]

    def _encode(
        self, group: WriteGroup, encoder: RowEncoder, run: Sequence[BucketCommand]
    ) -> tuple[list[bytes], list[memoryview]]:
        """For each command: its fields if the group is fenced, and its encoded pairs."""
        routed, first_row = group.routed, run[0].start
        order = routed.order[first_row : run[-1].stop]
        tables, ids = routed.tables.take(order), routed.ids.take(order)
        checks = np.empty(len(order), np.uint64)
        data = encoder.encode(tables, ids, group.rows.take(order), checks).data
        group.checks[order] = checks
        size = encoder.record_bytes
        bodies = [data[(start - first_row) * size : (stop - first_row) * size] for _, start, stop, _ in run]
        if group.entries is None:
            return [], bodies
        fields = np.empty(len(order), FIELD_DTYPE)
        fields["table"], fields["id"] = tables, ids
        text = fields.tobytes()
        return [
            text[(start - first_row) * FIELD_BYTES : (stop - first_row) * FIELD_BYTES] for _, start, stop, _ in run
        ], bodies


def _joined(pieces: Sequence[Piece]) -> Sequence[memoryview]:
    """The pieces of one request; as one piece if they are short: a piece costs as much as copying `_SHORT_BYTES`."""
    if sum(map(len, pieces)) < _SHORT_BYTES * len(pieces):
        return (memoryview(b"".join(pieces)),)
    return [memoryview(piece) for piece in pieces]


def runs_of(
    commands: Sequence[BucketCommand], record_bytes: int, first_bytes: int, most_bytes: int
) -> Iterator[Sequence[BucketCommand]]:
    """Group consecutive commands into runs, of at least one command each.

    A run has one command per bucket, because a transaction opens each bucket once.

    Args:
        commands: in sending order.
        record_bytes: encoded bytes of a row.
        first_bytes: approximate size of the first run. Each later run is twice as large.
        most_bytes: approximate size of the largest.
    """
    size, first, first_row, last_row, last_bucket = first_bytes, 0, -1, -1, -1
    for number, (bucket, start, stop, _) in enumerate(commands):
        if number > first and (start != last_row or bucket == last_bucket):
            yield commands[first:number]
            first = number
        if number == first:
            first_row = start
        last_row, last_bucket = stop, bucket
        if (stop - first_row) * record_bytes >= size:
            yield commands[first : number + 1]
            first, size = number + 1, min(2 * size, most_bytes)
    if first < len(commands):
        yield commands[first:]
