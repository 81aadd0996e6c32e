"""`IndexService`: one `Index` call per phase of a cacher that has this daemon as a shard.

    IndexHello ─> settings compared ─> IndexWelcome      IndexStart ─> IndexStream (thread) ──parts──> cacher
                                                         IndexAck ─> credits

Requests are untrusted. A stream holds no state that its data does not give: when it breaks, the cacher opens another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import MAX_CREDITS
from bagpipe.client.shared_ring import RingWriter
from bagpipe.errors import InputError, JobError
from cacher.calls import Calls, ProtocolError, kind_of, move, receive, send_messages
from cacher.counters import Counters
from cacher.planning import PlannedData
from cacher.requests import MAX_RANKS, check_protocol, check_settings, json_object, parse_start
from cacher.shard_stream import IndexStream, ShardTask

__all__ = ["IndexService"]

#: Streams at a time: phases of all jobs of all cachers that have this daemon as a shard.
_MAX_STREAMS = 32


class IndexService:
    """The `Index` method of the `bagpipe.v1.Cacher` service.

    Args:
        data: of the daemon; None: there is none, and every cacher is refused.
        settings: that a cacher must share.
        calls: of the service.
        counters: totals for the metrics.
        shares_memory: cachers on this host can get large parts through memory.
    """

    def __init__(
        self,
        data: PlannedData | None,
        settings: Mapping[str, Any],
        calls: Calls,
        counters: Counters,
        *,
        shares_memory: bool,
    ) -> None:
        self._data = data
        self._settings = settings
        self._calls = calls
        self._counters = counters
        self._shares_memory = shares_memory and RingWriter.is_supported
        self._num_streams = 0
        self._ending: list[IndexStream] = []

    @property
    def num_streams(self) -> int:
        """Phases that are indexed now."""
        return self._num_streams

    def ending(self) -> list[IndexStream]:
        """Streams that have ended, whose threads have not."""
        self._ending = [stream for stream in self._ending if not stream.join(0)]
        return self._ending

    async def index(self, requests: object, context: Any) -> None:
        """Serve one call."""
        await self._calls.answer(context, self._serve(context), lambda error: pb.IndexReply(error=error))

    async def _serve(self, context: Any) -> None:
        hello = (await self._calls.first(context, pb.IndexRequest)).hello
        check_protocol(hello.protocol)
        if self._data is None:
            raise InputError("the cacher has no data: it was started to plan only (--plan-only)")
        check_settings(self._settings, hello.settings, "the shard", "the cacher")
        if self._num_streams + len(self.ending()) >= _MAX_STREAMS:
            raise JobError(f"the shard indexes {self._num_streams} phases already, at most {_MAX_STREAMS}")
        with ExitStack() as opened:
            ring = self._open_ring(opened)
            welcome = pb.IndexWelcome(
                schema=json.dumps(self._data.schema.to_json()), identity=json.dumps(self._data.identity.to_json())
            )
            if ring is not None:
                file = ring.file
                welcome.file.CopyFrom(
                    pb.SharedFile(pid=file.pid, fd=file.fd, num_bytes=file.num_bytes, nonce=file.nonce)
                )
            self._counters.add(streams=1)
            await context.write(pb.IndexReply(welcome=welcome).SerializeToString())
            is_shared = False
            while (message := await receive(context, pb.IndexRequest)) is not None:
                if message.WhichOneof("kind") != "share":
                    break
                is_shared = ring is not None
            if message is None:
                return  # the cacher only wanted to know who is here
            if message.WhichOneof("kind") != "start":
                raise ProtocolError(f"expected IndexStart, got {kind_of(message)}")
            await self._run(context, self._task(self._data, message.start), ring if is_shared else None)

    async def _run(self, context: Any, task: ShardTask, ring: RingWriter | None) -> None:
        stream = IndexStream(task, ring, self._counters)
        self._num_streams += 1
        try:
            stream.start()
            await move(_read(stream, context), send_messages(stream, context))
        finally:
            stream.close()
            self._num_streams -= 1
            self._ending.append(stream)
        if stream.error is not None:
            raise stream.error

    def _open_ring(self, opened: ExitStack) -> RingWriter | None:
        """A ring until `opened` is closed; None without descriptors left: all parts go through the stream."""
        if not self._shares_memory:
            return None
        try:
            return opened.enter_context(RingWriter())
        except OSError:
            return None

    def _task(self, data: PlannedData, start: pb.IndexStart) -> ShardTask:
        """Check a request.

        Raises:
            InputError: the configuration does not allow the plan, or the request is malformed.
        """
        world_size = json_object(start.spec, "oracle spec").get("world_size")
        if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
            raise InputError(f"world size: expected 1 to {MAX_RANKS}, got {str(world_size)[:80]}")
        if not 1 <= start.credits <= MAX_CREDITS:
            raise InputError(f"credits: expected 1 to {MAX_CREDITS}, got {start.credits}")
        request = parse_start(
            pb.Start(
                phase=start.phase,
                spec=start.spec,
                first_batch=start.next_batch,
                next_batch=start.next_batch,
                reader_state=start.reader_state,
            ),
            settings=self._settings,
            schema=data.schema,
            world_size=world_size,
        )
        tables = frozenset(start.tables)
        if not tables <= set(range(len(request.spec.table_rows))):
            raise InputError(f"tables: expected numbers below {len(request.spec.table_rows)}, got {max(tables)}")
        return data.shard_task(
            request.phase,
            request.spec,
            tables,
            next_batch=start.next_batch,
            reader_state=request.reader_state,
            credits=start.credits,
            with_lengths=start.with_lengths,
            with_examples=start.with_examples,
        )


async def _read(stream: IndexStream, context: Any) -> None:
    while (message := await receive(context, pb.IndexRequest)) is not None:
        if message.WhichOneof("kind") != "ack":
            raise ProtocolError(f"expected IndexAck, got {kind_of(message)}")
        if not stream.acknowledge(message.ack.watermark):
            raise ProtocolError(f"acknowledged batches below {message.ack.watermark}, which were not sent")
