"""`ReadCodec`: rows to read as frames of HMGET requests for one link, and their replies back into request order.

    commands ──runs of 256 KiB──> encode a run at once ──> requests of about 128 KiB of replies, one frame per run
    replies of a run ──RowReplies──> parts ──> rows[order], checks[order], compared while more arrive

Cost per command outweighs cost per row in small batches, so a run is encoded and decoded as a whole whatever the number
of its commands. The server still gets small requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.request_pipeline import Accepted, Frame, Request
from bagpipe.store.redis.resp_rows import CommandHeaders, FieldEncoder, hmget_header
from bagpipe.store.redis.routing import BucketCommand, RoutedRows
from bagpipe.store.redis.row_codecs import runs_of
from bagpipe.store.redis.row_replies import Part, RowFormat, RowReplies
from bagpipe.store.row_checksum import check_words, value_dtype

__all__ = ["ReadCodec", "ReadGroup", "fill_group"]

#: Bytes of fields encoded at a time, and decoded as one run.
_RUN_BYTES = 256 << 10
#: Bytes of replies per request: what a local server answers while the client decodes (`Link.pace`).
_REQUEST_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadGroup:
    """Rows of one width to be read.

    Attributes:
        routed: rows to request.
        rows: void ``[n]``, filled in request order; untouched where a row is missing.
        checks: uint64 ``[n]``, stored check words.
        found: bool ``[n]``, initially True; set to False where a row is missing.
        damaged: positions of rows that do not match their check words, in arrays intp ``[any]``.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    checks: NDArray[np.uint64]
    found: NDArray[np.bool_]
    damaged: list[NDArray[np.intp]] = field(default_factory=list)


class ReadCodec:
    """HMGET requests whose replies fill a `ReadGroup`.

    Args:
        keys: key of each bucket.
        one_by_one: requests of one command each, of which each can be answered by a redirection.
    """

    def __init__(self, keys: Sequence[bytes], *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self._headers = CommandHeaders(keys, hmget_header)
        self._encoder = FieldEncoder()
        self._formats: dict[int, RowFormat] = {}

    def frames(self, group: ReadGroup, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        """See `bagpipe.store.redis.row_codecs.Codec.frames`."""
        row_bytes = group.rows.itemsize
        if row_bytes not in self._formats:
            self._formats[row_bytes] = RowFormat(value_dtype(row_bytes))
        row_format = self._formats[row_bytes]
        for run in runs_of(commands, self._encoder.record_bytes, _RUN_BYTES, _RUN_BYTES):
            first_row = run[0].start
            order = group.routed.order[first_row : run[-1].stop]
            data = self._encoder.encode(group.routed.tables.take(order), group.routed.ids.take(order)).tobytes()
            parts = [run[at : at + 1] for at in range(len(run))] if self._one_by_one else [run]
            requests: list[Request] = []
            for part in parts:
                rows = slice(part[0].start - first_row, part[-1].stop - first_row)
                reader = _RunReader(group, row_format, part, order[rows])
                requests += self._requests(part, reader, data, first_row)
            yield requests

    def _requests(
        self, run: Sequence[BucketCommand], reader: _RunReader, data: bytes, first_row: int
    ) -> Iterator[Request]:
        """Requests of several commands each. `data`: encoded fields from row `first_row` on."""
        size, header = self._encoder.record_bytes, self._headers.of
        commands = [
            header(bucket, stop - start) + data[(start - first_row) * size : (stop - first_row) * size]
            for bucket, start, stop, _ in run
        ]
        first, promised_bytes = 0, 0
        for last in reader.last_commands:
            stop, end = last + 1, int(reader.reply_ends[last])
            yield Request((memoryview(b"".join(commands[first:stop])),), end - promised_bytes, reader.accept)
            first, promised_bytes = stop, end


class _RunReader:
    """Puts the rows of one run's replies into their group.

    Args:
        group: to be filled.
        row_format: of its rows.
        run: consecutive commands.
        order: positions in the group of the run's rows, intp ``[rows of the run]``.

    Attributes:
        reply_ends: int64 ``[number of commands]``: bytes of the replies up to and including each if all rows are found.
        last_commands: number in the run of each request's last command.
    """

    def __init__(
        self,
        group: ReadGroup,
        row_format: RowFormat,
        run: Sequence[BucketCommand],
        order: NDArray[np.intp],
    ) -> None:
        self._group = group
        self._replies = replies = RowReplies(row_format, np.array([stop - start for _, start, stop, _ in run]))
        self._order = order
        self._num_ended = 0
        self.reply_ends = replies.ends
        numbers = replies.ends // _REQUEST_BYTES
        self.last_commands: list[int] = [*np.flatnonzero(numbers[1:] != numbers[:-1]).tolist(), len(run) - 1]
        first_row = run[0].start
        self._stops = [run[last].stop - first_row for last in self.last_commands]

    def accept(self, buffer: Bytes, start: int, end: int) -> Accepted | None:
        """Decode what has arrived. See `bagpipe.store.redis.request_pipeline.Accept`."""
        position, first = start, self._replies.row
        while (part := self._replies.decode(buffer, position, end)) is not None:
            fill_group(self._group, self._order[first : part.stop], part)
            position, first = part.end, part.stop
        if position == start:
            return None
        before = self._num_ended
        while self._num_ended < len(self._stops) and self._stops[self._num_ended] <= first:
            self._num_ended += 1
        return Accepted(position, self._num_ended - before)


def fill_group(group: ReadGroup, order: NDArray[np.intp], part: Part) -> None:
    """Store some decoded rows and compare their check words. `order`: their positions in the group."""
    if part.found is not None:
        group.found[order] = part.found
        order = order[part.found]
    records = part.records
    group.rows[order] = records["row"]
    group.checks[order] = records["check"]
    routed = group.routed
    wrong = check_words(routed.tables.take(order), routed.ids.take(order), records["row"]) != records["check"]
    if wrong.any():
        group.damaged.append(order[wrong])
