"""`DeleteCodec`: rows to delete as frames of HDEL requests for one link, as scripts if fenced.

commands ──runs of 64 KiB of fields──> a frame of requests: HDELs, or `bagpipe.store.redis.fenced_delete`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import open_key
from bagpipe.store.fencing.writer_logs import LogEntries
from bagpipe.store.keys import FIELD_BYTES, FIELD_DTYPE
from bagpipe.store.redis.fenced_delete import Deletion
from bagpipe.store.redis.log_guard import GuardedCommand
from bagpipe.store.redis.request_pipeline import Frame, Request
from bagpipe.store.redis.resp_rows import COUNT_REPLY_BYTES, CommandHeaders, FieldEncoder, decode_counts, hdel_header
from bagpipe.store.redis.routing import BucketCommand, RoutedRows
from bagpipe.store.redis.row_codecs import runs_of
from bagpipe.util.failpoints import hit

__all__ = ["DeleteCodec", "DeleteGroup", "batches_of"]

#: Bytes of fields per frame. Bounds a script's time in the server: 10 ms at most.
_RUN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeleteGroup:
    """Rows to delete, of any widths.

    Attributes:
        routed: rows to name.
        rows: their fields, `FIELD_DTYPE` ``[n]``, in request order.
        entries: log entries if fenced.
    """

    routed: RoutedRows
    rows: NDArray[np.void]
    entries: LogEntries | None = None

    @classmethod
    def of(cls, routed: RoutedRows, entries: LogEntries | None) -> DeleteGroup:
        """The group of routed rows."""
        fields = np.empty(len(routed.ids), FIELD_DTYPE)
        fields["table"], fields["id"] = routed.tables, routed.ids
        return cls(routed=routed, rows=fields, entries=entries)


class DeleteCodec:
    """HDEL requests with the rows of a `DeleteGroup`, in scripts if fenced.

    Args:
        keys: key of each bucket.
        max_request_commands: maximum HDELs per request; above 1 all buckets of a link must share a server.
    """

    def __init__(self, keys: Sequence[bytes], *, max_request_commands: int) -> None:
        self._keys = keys
        self._headers = CommandHeaders(keys, hdel_header)
        self._encoder = FieldEncoder()
        self._max_request_commands = max_request_commands

    def frames(self, group: DeleteGroup, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        """See `bagpipe.store.redis.row_codecs.Codec.frames`."""
        at_once = self._max_request_commands
        for run in runs_of(commands, FIELD_BYTES, _RUN_BYTES, _RUN_BYTES):
            parts = [run[start : start + at_once] for start in range(0, len(run), at_once)]
            if group.entries is None:
                yield self._plain(group, run, parts)
            else:
                yield [self._guarded(group, group.entries, part) for part in parts]
            hit("mid-write-back")

    def _plain(
        self, group: DeleteGroup, run: Sequence[BucketCommand], parts: Sequence[Sequence[BucketCommand]]
    ) -> Frame:
        size, first_row = self._encoder.record_bytes, run[0].start
        order = group.routed.order[first_row : run[-1].stop]
        data = self._encoder.encode(group.routed.tables.take(order), group.routed.ids.take(order)).tobytes()
        requests = []
        for part in parts:
            words = [
                self._headers.of(bucket, stop - start) + data[(start - first_row) * size : (stop - first_row) * size]
                for bucket, start, stop, _ in part
            ]
            counts = [stop - start for _, start, stop, _ in part]
            accept = partial(decode_counts, counts=counts)
            requests.append(Request((memoryview(b"".join(words)),), COUNT_REPLY_BYTES * len(counts), accept))
        return requests

    def _guarded(self, group: DeleteGroup, entries: LogEntries, part: Sequence[BucketCommand]) -> Request:
        commands = tuple(
            GuardedCommand(
                self._keys[bucket],
                open_key(self._keys[bucket]),
                entries.keys[bucket],
                entries.lengths[bucket] + number,
                stop - start,
            )
            for bucket, start, stop, number in part
        )
        fields = [group.rows.take(group.routed.order[start:stop]).tobytes() for _, start, stop, _ in part]
        deletion = Deletion(token=entries.token, commands=commands)
        return Request((memoryview(deletion.encode(fields)),), deletion.max_reply_bytes, deletion.accept)


def batches_of(
    deletions: Sequence[tuple[int, NDArray[np.int64]]], max_rows: int
) -> Iterator[list[tuple[int, NDArray[np.int64]]]]:
    """Split ids by table into batches of at most `max_rows` ids, in order; none without ids."""
    batch, num_rows = list[tuple[int, NDArray[np.int64]]](), 0
    for table, ids in deletions:
        first = 0
        while first < len(ids):
            part = ids[first : first + max_rows - num_rows]
            batch.append((table, part))
            first, num_rows = first + len(part), num_rows + len(part)
            if num_rows == max_rows:
                yield batch
                batch, num_rows = [], 0
    if batch:
        yield batch
