"""`CacherService`: one `Train` call per trainer rank. One coroutine reads requests, another sends batches.

    reader: Hello ─> jobs.enter ─> Welcome      Start ─> jobs.begin      Ack ─> run.acknowledge      Leave ─> jobs.leave
    sender: run.item(rank, next batch) ─> stream while there is one; then sleeps until the run wakes it

Requests are untrusted. A stream without a Hello in time, or with an invalid message, is ended. If too many streams are
silent, the longest silent one is ended, so that a trainer always finds room.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from bagpipe.client import cacher_pb2 as pb
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import DataSchema
from cacher.counters import Counters
from cacher.jobs import EnteredRun, Jobs, Member

__all__ = ["SERVICE_NAME", "CacherService"]

_LOG = logging.getLogger("cacher")

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Cacher"].full_name


class CacherService:
    """The `bagpipe.v1.Cacher` service.

    Args:
        jobs: the jobs served.
        schema: of the data.
        identity: of the batches.
        counters: totals for the metrics.
        hello_timeout_s: longest wait for a Hello.
        max_silent: most streams without a Hello.
    """

    def __init__(
        self,
        jobs: Jobs,
        schema: DataSchema,
        identity: BatchIdentity,
        counters: Counters,
        *,
        hello_timeout_s: float = 10.0,
        max_silent: int = 256,
    ) -> None:
        self._jobs = jobs
        welcome = pb.Welcome(schema=json.dumps(schema.to_json()), identity=json.dumps(identity.to_json()))
        self._welcome: bytes = pb.CacherMessage(welcome=welcome).SerializeToString()
        self._counters = counters
        self._hello_timeout_s = hello_timeout_s
        self._max_silent = max_silent
        self._silent: dict[_Stream, None] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handler for a server. Messages pass as bytes: sent ones are serialised already."""
        handler = grpc.stream_stream_rpc_method_handler(self._train)
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Train": handler})

    @property
    def num_silent(self) -> int:
        """Streams without a Hello yet."""
        return len(self._silent)

    async def _train(self, requests: object, context: Any) -> None:
        stream = _Stream(context, self._jobs, self._counters)
        try:
            await self._serve(stream)
        except (InputError, JobError) as error:
            self._counters.add(refused=1)
            _LOG.warning("refused", extra={"peer": context.peer(), "reason": str(error)})
            await _tell(context, error)
        except grpc.aio.BaseError:
            pass  # the trainer is gone
        except _ProtocolError as error:
            self._counters.add(dropped=1)
            _LOG.warning("dropped", extra={"peer": context.peer(), "reason": str(error)})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # a defect: the trainer must get an error instead of retrying forever
            _LOG.exception("stream failed", extra={"peer": context.peer()})
            await _tell(context, JobError(f"the cacher failed: {type(error).__name__}: {error}"))

    async def _serve(self, stream: _Stream) -> None:
        hello = await self._hello(stream)
        member = self._jobs.enter(hello, stream)
        stream.member = member
        try:
            self._counters.add(streams=1)
            await stream.send(self._welcome)
            if await stream.serve():
                self._jobs.leave(member, stream)
        except (grpc.aio.BaseError, _ProtocolError):
            raise
        except Exception:
            self._jobs.leave(member, stream)  # an error is the last message to a trainer
            raise
        finally:
            self._jobs.lose(member, stream)  # no-op if it has left

    async def _hello(self, stream: _Stream) -> pb.Hello:
        self._silent[stream] = None
        if len(self._silent) > self._max_silent:
            next(iter(self._silent)).replaced()
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                message = await stream.receive()
        except TimeoutError:
            raise _ProtocolError(f"expected Hello within {self._hello_timeout_s:g} s") from None
        finally:
            self._silent.pop(stream, None)
        if message is None or message.WhichOneof("kind") != "hello":
            raise _ProtocolError(f"expected Hello, got {_kind(message)}")
        return message.hello


class _ProtocolError(Exception):
    """The peer violates the protocol."""


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
        self.member: Member | None = None

    def wake(self) -> None:
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    def replaced(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def send(self, message: bytes) -> None:
        await self._context.write(message)

    async def receive(self) -> pb.TrainerMessage | None:
        """The next request; None at the end of the stream."""
        data = await self._context.read()
        if data is grpc.aio.EOF:
            return None
        try:
            message: pb.TrainerMessage = pb.TrainerMessage.FromString(data)
        except DecodeError:
            raise _ProtocolError(f"expected a TrainerMessage, got {len(data)} bytes of something else") from None
        return message

    async def serve(self) -> bool:
        """Serve until the rank leaves or gets an error (True), or its stream ends (False)."""
        reader, sender = asyncio.create_task(self._read()), asyncio.create_task(self._send_batches())
        try:
            done, _ = await asyncio.wait((reader, sender), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, sender):
                task.cancel()
            # The tasks end before the call: writing to an ended call is an error.
            await asyncio.gather(reader, sender, return_exceptions=True)
        return all(task.result() for task in done)

    async def _read(self) -> bool:
        assert self.member is not None
        while (message := await self.receive()) is not None:
            kind = message.WhichOneof("kind")
            if kind == "start":
                self._entered = self._jobs.begin(self.member, message.start)
                self._next = self._entered.next_batch if self._entered is not None else 0
                self._changed.set()
            elif kind == "ack":
                self._acknowledge(message.ack)
            elif kind == "leave":
                return True
            else:
                raise _ProtocolError(f"expected Start, Ack or Leave, got {_kind(message)}")
        return False

    def _acknowledge(self, ack: pb.Ack) -> None:
        assert self.member is not None
        entered = self._entered
        if entered is None or ack.run > entered.number:
            raise _ProtocolError(f"acknowledged run {ack.run} before it began")
        if ack.run < entered.number:
            return  # sent before the rank went on
        if ack.watermark > self._next or not entered.run.acknowledge(self.member.rank, ack.watermark):
            raise _ProtocolError(f"acknowledged batches below {ack.watermark}, {self._next} is to be sent next")

    async def _send_batches(self) -> bool:
        """Send batches. Returns True once an error has been sent."""
        assert self.member is not None
        ended: EnteredRun | None = None
        while True:
            self._changed.clear()
            if self._error is not None:
                await self.send(_error_message(self._error))
                return True
            entered = self._entered
            item = None if entered is None or entered is ended else entered.run.item(self.member.rank, self._next)
            if item is None:
                await self._changed.wait()
                continue
            message, is_last = item
            if is_last:
                ended = entered
                if entered is not None and entered.run.has_failed:
                    await self.send(message)
                    return True
            else:
                # Before the send: an Ack or another Start can arrive while `send` waits.
                self._next += 1
                self._counters.add(batches_sent=1, bytes_sent=len(message))
            await self.send(message)


async def _tell(context: Any, error: Exception) -> None:
    with suppress(grpc.aio.BaseError):  # the peer can be gone
        await context.write(_error_message(error))


def _error_message(error: Exception) -> bytes:
    kind = type(error).__name__ if isinstance(error, (CapacityError, InputError)) else "JobError"
    message: bytes = pb.CacherMessage(error=pb.Error(kind=kind, message=str(error))).SerializeToString()
    return message


def _kind(message: pb.TrainerMessage | None) -> str:
    return "the end of the stream" if message is None else str(message.WhichOneof("kind") or "an empty message")
