"""`ReadCodec`: rows to read as frames of HMGET requests for one link, and their replies back into request order.

    commands ──runs of 32 KiB──> encode a run at once ──> requests of about 64 KiB of replies, one frame per run
    replies of a run ──RowReplies──> parts ──> rows[order], checks[order]

Cost per command outweighs cost per row in small batches, so a run is encoded and decoded as a whole whatever the number
of its commands. The server still gets small requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.request_pipeline import Accepted, Frame, Request
from bagpipe.store.redis.resp_rows import FieldEncoder, hmget_header
from bagpipe.store.redis.routing import BucketCommand, RoutedRows
from bagpipe.store.redis.row_codecs import runs_of, slice_of
from bagpipe.store.redis.row_replies import Part, RowFormat, RowReplies
from bagpipe.store.row_checksum import value_dtype

__all__ = ["ReadCodec", "ReadGroup"]

#: Bytes of fields encoded at a time, and decoded together.
_RUN_BYTES = 32 << 10
#: Bytes of replies per request: what a local server answers while the client decodes (`Link.pace`).
_REQUEST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadGroup:
    """Rows of one width to be read.

    Attributes:
        routed: rows to request.
        rows: void ``[n]``, filled in request order; untouched where a row is missing.
        checks: uint64 ``[n]``, stored check words.
        found: bool ``[n]``, initially True; set to False where a row is missing.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    checks: NDArray[np.uint64]
    found: NDArray[np.bool_]


class ReadCodec:
    """HMGET requests whose replies fill a `ReadGroup`.

    Args:
        keys: key of each bucket.
        one_by_one: requests of one command each, of which each can be answered by a redirection.
    """

    def __init__(self, keys: Sequence[bytes], *, one_by_one: bool = False) -> None:
        self._keys = keys
        self._one_by_one = one_by_one
        self._encoder = FieldEncoder()
        self._formats: dict[int, RowFormat] = {}

    def frames(self, group: ReadGroup, commands: Iterable[BucketCommand]) -> Iterator[Frame]:
        """See `bagpipe.store.redis.row_codecs.Codec.frames`."""
        row_bytes = group.rows.itemsize
        if row_bytes not in self._formats:
            self._formats[row_bytes] = RowFormat(value_dtype(row_bytes))
        row_format = self._formats[row_bytes]
        for run in runs_of(commands, self._encoder.record_bytes, _RUN_BYTES, _RUN_BYTES):
            first_row = run[0].start
            order = group.routed.order[first_row : run[-1].stop]
            data = self._encoder.encode(group.routed.tables.take(order), group.routed.ids.take(order)).data
            parts = [[command] for command in run] if self._one_by_one else [run]
            requests: list[Request] = []
            for part in parts:
                rows = slice(part[0].start - first_row, part[-1].stop - first_row)
                reader = _RunReader(group, row_format, part, order[rows])
                requests += self._requests(part, reader, data[rows.start * self._encoder.record_bytes :])
            yield requests

    def _requests(self, run: Sequence[BucketCommand], reader: _RunReader, data: memoryview) -> Iterator[Request]:
        """Requests of several commands each, whose fields are `data`."""
        pieces: list[bytes | memoryview] = []
        first_row, promised_bytes = run[0].start, 0
        for command, end in zip(run, reader.reply_ends, strict=True):
            pieces.append(hmget_header(self._keys[command.bucket], command.stop - command.start))
            pieces.append(slice_of(data, command, first_row, self._encoder.record_bytes))
            if end - promised_bytes >= _REQUEST_BYTES or command is run[-1]:
                reader.stops.append(command.stop - first_row)
                yield Request((memoryview(b"".join(pieces)),), end - promised_bytes, reader.accept)
                pieces, promised_bytes = [], end


class _RunReader:
    """Puts the rows of one run's replies into their group.

    Args:
        group: to be filled.
        row_format: of its rows.
        run: consecutive commands.
        order: positions in the group of the run's rows, intp ``[rows of the run]``.

    Attributes:
        reply_ends: for each command, bytes of the replies up to and including its own if all rows are found.
        stops: for each request, rows up to and including its own; filled by the codec.
    """

    def __init__(
        self,
        group: ReadGroup,
        row_format: RowFormat,
        run: Sequence[BucketCommand],
        order: NDArray[np.intp],
    ) -> None:
        self._group = group
        self._replies = RowReplies(row_format, np.array([command.stop - command.start for command in run]))
        self._order = order
        self._num_ended = 0
        self.reply_ends: list[int] = self._replies.ends.tolist()
        self.stops: list[int] = []

    def accept(self, buffer: Bytes, start: int, end: int) -> Accepted | None:
        """Decode what has arrived. See `bagpipe.store.redis.request_pipeline.Accept`."""
        position, first = start, self._replies.row
        while (part := self._replies.decode(buffer, position, end)) is not None:
            self._fill(part, first)
            position, first = part.end, part.stop
        if position == start:
            return None
        before = self._num_ended
        while self._num_ended < len(self.stops) and self.stops[self._num_ended] <= first:
            self._num_ended += 1
        return Accepted(position, self._num_ended - before)

    def _fill(self, part: Part, first: int) -> None:
        """Store rows ``[first, part.stop)`` of the run."""
        group, records, rows = self._group, part.records, slice(first, part.stop)
        order = self._order[rows]
        if part.found is not None:
            group.found[order] = part.found
            order = order[part.found]
        group.rows[order] = records["row"]
        group.checks[order] = records["check"]
