"""`writing_client`: the client of the writing thread. It writes, rotates logs, deletes, and reads what it deletes.

WriteGroup, LogRotation ──WriteCodec──┐
DeleteGroup ─────────────DeleteCodec──┼──> frames of one link
ReadGroup ───────────────ReadCodec────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.cluster_client import bucket_client
from bagpipe.store.redis.delete_codec import DeleteCodec, DeleteGroup
from bagpipe.store.redis.read_codec import ReadCodec, ReadGroup
from bagpipe.store.redis.request_pipeline import Frame
from bagpipe.store.redis.routing import BucketCommand
from bagpipe.store.redis.row_codecs import MAX_REQUEST_COMMANDS, LogRotation, WriteCodec, WriteGroup
from bagpipe.store.redis.servers import Server
from bagpipe.store.redis.shard_client import ShardClient

__all__ = ["Change", "WritingCodec", "writing_client"]

#: A group of the writing thread.
Change: TypeAlias = WriteGroup | LogRotation | DeleteGroup | ReadGroup


class WritingCodec:
    """Requests of any `Change`. Codecs that a job may never use are made when it does.

    Args:
        keys: key of each bucket.
        one_by_one: requests of one command each.
    """

    def __init__(self, keys: Sequence[bytes], *, one_by_one: bool = False) -> None:
        self._keys = keys
        self._one_by_one = one_by_one
        self._max_request_commands = 1 if one_by_one else MAX_REQUEST_COMMANDS
        self._writes = WriteCodec(keys, max_request_commands=self._max_request_commands)

    def frames(self, group: Change, commands: Sequence[BucketCommand]) -> Iterator[Frame]:
        """See `bagpipe.store.redis.row_codecs.Codec.frames`."""
        if isinstance(group, DeleteGroup):
            return self._deletions.frames(group, commands)
        if isinstance(group, ReadGroup):
            return self._reads.frames(group, commands)
        return self._writes.frames(group, commands)

    @cached_property
    def _deletions(self) -> DeleteCodec:
        return DeleteCodec(self._keys, max_request_commands=self._max_request_commands)

    @cached_property
    def _reads(self) -> ReadCodec:
        return ReadCodec(self._keys, one_by_one=self._one_by_one)


def writing_client(
    backends: Cluster | Sequence[Server], keys: Sequence[bytes], timeout_s: float
) -> ShardClient[Change]:
    """A client whose commands are those of the writing thread.

    Args:
        backends: a cluster, or the servers in order.
        keys: of the buckets, by number.
        timeout_s: deadline of one batch, and of every connection attempt.
    """
    return bucket_client(backends, keys, timeout_s, WritingCodec)
