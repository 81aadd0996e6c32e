"""`TrainService`: one `Train` call per trainer rank. One coroutine reads requests, another sends batches.

    reader: Hello ─> jobs.enter ─> Welcome      Start ─> jobs.begin      Ack ─> run.acknowledge      Leave ─> jobs.leave
    sender: run.take(rank, next batch) ─> stream while there is one; then sleeps until the run wakes it
            large messages ─> memory shared with the trainer, once it has opened it (Share)

Requests are untrusted. A stream without a Hello in time, or with an invalid message, is ended.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import grpc

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.shared_ring import MIN_SHARED_BYTES, RingWriter
from bagpipe.errors import InputError
from cacher.calls import Calls, ProtocolError, error_of, kind_of, move, receive
from cacher.counters import Counters
from cacher.jobs import EnteredRun, Jobs, Member
from cacher.planning import PlannedData
from cacher.security import client_of

__all__ = ["TrainService"]


class TrainService:
    """The `Train` method of the `bagpipe.v1.Cacher` service.

    Args:
        jobs: the jobs served.
        data: of all jobs; None: there is none, and every trainer is refused.
        calls: of the service.
        counters: totals for the metrics.
        max_rings: most streams of ranks on this host that get large messages through memory.
    """

    def __init__(
        self, jobs: Jobs, data: PlannedData | None, calls: Calls, counters: Counters, *, max_rings: int
    ) -> None:
        self._jobs = jobs
        self._welcome = None if data is None else _welcome(data)
        self._rings_left = max_rings if RingWriter.is_supported else 0
        self._calls = calls
        self._counters = counters

    async def train(self, requests: object, context: Any) -> None:
        """Serve one call."""
        await self._calls.answer(context, self._serve(context), lambda error: pb.CacherMessage(error=error))

    async def _serve(self, context: Any) -> None:
        stream = _Stream(context, self._jobs, self._counters)
        hello = (await self._calls.first(context, pb.TrainerMessage)).hello
        if self._welcome is None:
            raise InputError("the cacher has no data: it was started to plan only (--plan-only)")
        member = self._jobs.enter(hello, stream, client_of(context))
        stream.member = member
        opened = ExitStack()
        try:
            self._counters.add(streams=1)
            if self._rings_left:
                stream.ring = self._open_ring(opened)
            await stream.send_welcome(self._welcome)
            if await stream.serve():
                self._jobs.leave(member, stream)
            if stream.has_left:
                await self._calls.last(context, pb.TrainerMessage)
        except (grpc.aio.BaseError, ProtocolError):
            raise
        except Exception:
            self._jobs.leave(member, stream)  # an error is the last message to a trainer
            raise
        finally:
            self._jobs.lose(member, stream)  # no-op if it has left
            opened.close()

    def _open_ring(self, opened: ExitStack) -> RingWriter | None:
        """A ring until `opened` is closed; None without descriptors left: all messages go through the stream."""
        try:
            ring = opened.enter_context(RingWriter())
        except OSError:
            return None
        self._rings_left -= 1
        opened.callback(self._give_back_ring)
        return ring

    def _give_back_ring(self) -> None:
        self._rings_left += 1


def _welcome(data: PlannedData) -> pb.Welcome:
    return pb.Welcome(schema=json.dumps(data.schema.to_json()), identity=json.dumps(data.identity.to_json()))


class _Stream:
    """One call: implements `cacher.jobs.Stream`."""

    def __init__(self, context: Any, jobs: Jobs, counters: Counters) -> None:
        self._context = context
        self._jobs = jobs
        self._counters = counters
        self._task = asyncio.current_task()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._entered: EnteredRun | None = None
        self._next = 0
        self._ring_is_open = False  # at the trainer
        self.ring: RingWriter | None = None
        self.member: Member | None = None
        self.has_left = False

    def wake(self) -> None:
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    def replaced(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def send_welcome(self, welcome: pb.Welcome) -> None:
        message = pb.CacherMessage(welcome=welcome)
        if self.ring is not None:
            file = self.ring.file
            message.welcome.file.CopyFrom(
                pb.SharedFile(pid=file.pid, fd=file.fd, num_bytes=file.num_bytes, nonce=file.nonce)
            )
        await self._context.write(message.SerializeToString())

    async def send(self, message: bytes) -> None:
        await self._context.write(self._shared(message) or message)

    def _shared(self, message: bytes) -> bytes | None:
        """Put a message into shared memory. Returns the message that tells of it; None if it is not there."""
        if self.ring is None or not self._ring_is_open or len(message) < MIN_SHARED_BYTES:
            return None
        try:
            start = self.ring.put(message)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if start is None:
            return None
        told: bytes = pb.CacherMessage(shared=pb.Shared(start=start, num_bytes=len(message))).SerializeToString()
        self._counters.add(bytes_shared=len(message))
        return told

    async def serve(self) -> bool:
        """Serve until the rank leaves or gets an error (True), or its stream ends (False)."""
        return all(await move(self._read(), self._send_batches()))

    async def _read(self) -> bool:
        assert self.member is not None
        while (message := await receive(self._context, pb.TrainerMessage)) is not None:
            kind = message.WhichOneof("kind")
            if kind == "start":
                self._entered = self._jobs.begin(self.member, message.start)
                self._next = self._entered.next_batch if self._entered is not None else 0
                self._changed.set()
            elif kind == "ack":
                self._acknowledge(message.ack)
            elif kind == "share":
                self._ring_is_open = self.ring is not None
            elif kind == "leave":
                self.has_left = True
                return True
            else:
                raise ProtocolError(f"expected Start, Ack, Share or Leave, got {kind_of(message)}")
        return False

    def _acknowledge(self, ack: pb.Ack) -> None:
        assert self.member is not None
        entered = self._entered
        if entered is None or ack.run > entered.number:
            raise ProtocolError(f"acknowledged run {ack.run} before it began")
        if ack.run < entered.number:
            return  # sent before the rank went on
        if ack.watermark > self._next or not entered.run.acknowledge(self.member.rank, ack.watermark):
            raise ProtocolError(f"acknowledged batches below {ack.watermark}, {self._next} is to be sent next")
        self._changed.set()  # the rank has fewer batches: more can be due

    async def _send_batches(self) -> bool:
        """Send batches. Returns True once an error has been sent."""
        assert self.member is not None
        ended: EnteredRun | None = None
        while True:
            self._changed.clear()
            if self._error is not None:
                await self.send(pb.CacherMessage(error=error_of(self._error)).SerializeToString())
                return True
            entered = self._entered
            taken = None if entered is None or entered is ended else entered.run.take(self.member.rank, self._next)
            if taken is None:
                await self._changed.wait()
                continue
            if taken.is_last:
                ended = entered
                if entered is not None and entered.run.has_failed:
                    await self.send(taken.message)
                    return True
            else:
                # Before the send: an Ack or another Start can arrive while `send` waits.
                self._next += taken.num_batches
                self._counters.add(batches_sent=taken.num_batches, bytes_sent=len(taken.message))
            await self.send(taken.message)
