"""`ReadCodec`: rows to read as frames of HMGET requests for one link, and their replies back into request order.

    commands ──runs of 256 KiB──> encode a run at once ──> requests of about 128 KiB of replies, one frame per run
    replies of a run ──RowReplies──> parts ──> rows[order], checks[order], compared while more arrive

Cost per command outweighs cost per row in small batches, so a run is encoded and decoded as a whole whatever the number
of its commands. The server still gets small requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.request_pipeline import Accepted, Frame, Request
from bagpipe.store.redis.resp_rows import CommandHeaders, ErrorReply, FieldEncoder, hmget_header
from bagpipe.store.redis.routing import BucketCommand, RoutedRows
from bagpipe.store.redis.row_codecs import runs_of
from bagpipe.store.redis.row_replies import Part, RowFormat, RowReplies
from bagpipe.store.row_checksum import check_words, value_dtype

__all__ = ["ReadCodec", "ReadGroup", "damaged_rows", "fill_group"]

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
        found: bool ``[n]``, whether the row is in the store.
        damaged: positions of rows that did not match their check words, in arrays intp ``[any]``. After a lost
            connection a row is read again; `damaged_rows` has the last word.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    checks: NDArray[np.uint64]
    found: NDArray[np.bool_]
    damaged: list[NDArray[np.intp]] = field(default_factory=list)


class SentRows(NamedTuple):
    """Rows in sending order.

    Attributes:
        order: positions in the group, intp ``[n]``.
        tables: table numbers, uint32 ``[n]``.
        ids: ids, int64 ``[n]``.
    """

    order: NDArray[np.intp]
    tables: NDArray[np.uint32]
    ids: NDArray[np.int64]

    def part(self, which: slice | NDArray[np.bool_]) -> SentRows:
        """Some of the rows."""
        return SentRows(self.order[which], self.tables[which], self.ids[which])


class ReadCodec:
    """HMGET requests whose replies fill a `ReadGroup`.

    Args:
        keys: key of each bucket.
        one_by_one: requests of one command each, of which each can be answered by an error line, such as a redirection.
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
            if not group.found.all():  # other rows are missing, or an earlier attempt has missed some of these
                group.found[order] = True
            sent = SentRows(order, group.routed.tables.take(order), group.routed.ids.take(order))
            data = self._encoder.encode(sent.tables, sent.ids).tobytes()
            reader = _RunReader(group, row_format, run, sent, one_by_one=self._one_by_one)
            yield self._requests(run, reader, data)

    def _requests(self, run: Sequence[BucketCommand], reader: _RunReader, data: bytes) -> list[Request]:
        """Requests of the run. `data`: its encoded fields."""
        size, header, first_row = self._encoder.record_bytes, self._headers.of, run[0].start
        commands = [
            header(bucket, stop - start) + data[(start - first_row) * size : (stop - first_row) * size]
            for bucket, start, stop, _ in run
        ]
        requests, accept = list[Request](), reader.accept
        first, promised_bytes = 0, 0
        for last, end in zip(reader.last_commands, reader.reply_ends, strict=True):
            stop = last + 1
            words = commands[last] if first == last else b"".join(commands[first:stop])
            requests.append(Request((memoryview(words),), end - promised_bytes, accept))
            first, promised_bytes = stop, end
        return requests


class _RunReader:
    """Puts the rows of one run's replies into their group.

    Args:
        group: to be filled.
        row_format: of its rows.
        run: consecutive commands.
        sent: the run's rows.
        one_by_one: a request has one command.

    Attributes:
        last_commands: number in the run of each request's last command.
        reply_ends: bytes of the replies up to and including each request's, if all rows are found.
    """

    def __init__(
        self,
        group: ReadGroup,
        row_format: RowFormat,
        run: Sequence[BucketCommand],
        sent: SentRows,
        *,
        one_by_one: bool,
    ) -> None:
        self._group = group
        self._replies = replies = RowReplies(row_format, np.array([stop - start for _, start, stop, _ in run]))
        self._sent = sent
        self._num_ended = 0
        numbers = np.arange(len(run)) if one_by_one else replies.ends // _REQUEST_BYTES
        last = np.append(np.flatnonzero(numbers[1:] != numbers[:-1]), len(run) - 1)
        self.last_commands: list[int] = last.tolist()
        self.reply_ends: list[int] = replies.ends[last].tolist()
        self._stops: list[int] = replies.stops[last].tolist()

    def accept(self, buffer: Bytes, start: int, end: int) -> Accepted | None:
        """Decode what has arrived. See `bagpipe.store.redis.request_pipeline.Accept`.

        Raises:
            ErrorReply: an error line in place of the reply at `start`. The next call continues after it.
            StoreError: any other wrong reply.
        """
        position, first = start, self._replies.row
        try:
            while (part := self._replies.decode(buffer, position, end)) is not None:
                fill_group(self._group, self._sent.part(slice(first, part.stop)), part)
                position, first = part.end, part.stop
        except ErrorReply as error:
            num_ended = self._count_ended()
            if not num_ended:
                self._replies.skip()
                error.num_requests = self._count_ended()
                raise
            return Accepted(position, num_ended, is_all=False)  # the next call meets the error line at its start
        if position == start:
            return None
        return Accepted(position, self._count_ended(), is_all=not self._replies.done)

    def _count_ended(self) -> int:
        """Requests whose last rows were decoded since the last call."""
        before = self._num_ended
        self._num_ended = bisect_right(self._stops, self._replies.row, before)
        return self._num_ended - before


def damaged_rows(group: ReadGroup) -> NDArray[np.intp]:
    """Positions of found rows that do not match their check words, intp ``[any]``, ascending."""
    if not group.damaged:
        return np.empty(0, np.intp)
    some = np.unique(np.concatenate(group.damaged))
    words = check_words(group.routed.tables[some], group.routed.ids[some], group.rows[some])
    wrong: NDArray[np.intp] = some[(words != group.checks[some]) & group.found[some]]
    return wrong


def fill_group(group: ReadGroup, sent: SentRows, part: Part) -> None:
    """Store some decoded rows and compare their check words. `sent`: the part's rows."""
    if part.found is not None:
        group.found[sent.order] = part.found
        sent = sent.part(part.found)
    records, order = part.records, sent.order
    group.rows[order] = records["row"]
    group.checks[order] = records["check"]
    wrong = check_words(sent.tables, sent.ids, records["row"]) != records["check"]
    if wrong.any():
        group.damaged.append(order[wrong])
