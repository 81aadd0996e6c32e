"""The common part of all calls of the service: their first message, and their end. Peers are untrusted.

    call ──Calls.first──> hello, in time      serve ──error──> Error message │ INVALID_ARGUMENT, logged and counted

If too many streams are silent, the longest silent one is ended, so that a trainer always finds room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from bagpipe.client import cacher_pb2 as pb
from bagpipe.errors import CapacityError, InputError, JobError
from cacher.counters import Counters

__all__ = ["Calls", "MessageStream", "ProtocolError", "error_of", "kind_of", "move", "receive", "send_messages"]

_LOG = logging.getLogger("cacher")

_Message = TypeVar("_Message", bound=Message)
_Result = TypeVar("_Result")


class ProtocolError(Exception):
    """The peer violates the protocol."""


class MessageStream(Protocol):
    """A thread whose messages a call sends.

    Attributes:
        has_message: set while `take` has something to return.
    """

    has_message: asyncio.Event

    def take(self) -> tuple[bytes | None, bool]:
        """The next message, None if there is none now; and whether the stream has ended."""
        ...


class Calls:
    """The calls of a service.

    Args:
        counters: totals for the metrics.
        hello_timeout_s: longest wait for a first message, and for the end of a stream after the last one.
        max_silent: most streams without one.
    """

    def __init__(self, counters: Counters, *, hello_timeout_s: float = 10.0, max_silent: int = 256) -> None:
        self._counters = counters
        self._hello_timeout_s = hello_timeout_s
        self._max_silent = max_silent
        self._silent: dict[asyncio.Task[Any], None] = {}

    @property
    def num_silent(self) -> int:
        """Streams without a first message yet."""
        return len(self._silent)

    async def first(self, context: Any, message_type: type[_Message]) -> _Message:
        """A stream's first message, which is a Hello.

        Raises:
            ProtocolError: something else came, or nothing in time.
        """
        task = asyncio.current_task()
        assert task is not None, "calls are tasks"
        self._silent[task] = None
        if len(self._silent) > self._max_silent:
            next(iter(self._silent)).cancel()
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                message = await receive(context, message_type)
        except TimeoutError:
            raise ProtocolError(f"expected Hello within {self._hello_timeout_s:g} s") from None
        finally:
            self._silent.pop(task, None)
        if message is None or message.WhichOneof("kind") != "hello":
            raise ProtocolError(f"expected Hello, got {kind_of(message)}")
        return message

    async def last(self, context: Any, message_type: type[_Message]) -> None:
        """Wait until the peer has ended its side of the stream, which its last message announced.

        A call answered before can close the connection while gRPC sends the peer's end, and the peer sees an error.
        A peer that does not end its side within the time of a first message is not waited for any longer.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._hello_timeout_s):
                while await receive(context, message_type) is not None:
                    pass

    async def answer(self, context: Any, serving: Awaitable[None], told: Callable[[pb.Error], Message]) -> None:
        """Serve a call to its end. No error leaves it: the peer gets it.

        Args:
            context: of the call.
            serving: serves it.
            told: makes the last message, with an error.
        """
        try:
            await serving
        except (InputError, JobError) as error:
            self._counters.add(refused=1)
            _LOG.warning("refused", extra={"peer": context.peer(), "reason": str(error)})
            await _tell(context, told(error_of(error)))
        except grpc.aio.BaseError:
            pass  # the trainer is gone
        except ProtocolError as error:
            self._counters.add(dropped=1)
            _LOG.warning("dropped", extra={"peer": context.peer(), "reason": str(error)})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # a defect: the trainer must get an error instead of retrying forever
            _LOG.exception("stream failed", extra={"peer": context.peer()})
            failed = JobError(f"the cacher failed: {type(error).__name__}: {error}")
            await _tell(context, told(error_of(failed)))


async def receive(context: Any, message_type: type[_Message]) -> _Message | None:
    """The next message of a call; None at the end of the stream.

    Raises:
        ProtocolError: the bytes are no such message.
    """
    data = await context.read()
    if data is grpc.aio.EOF:
        return None
    try:
        message: _Message = message_type.FromString(data)
    except DecodeError:
        raise ProtocolError(f"expected a {message_type.__name__}, got {len(data)} bytes of something else") from None
    return message


async def move(*sides: Coroutine[Any, Any, _Result]) -> list[_Result]:
    """Run the sides of a call, such as its reader and its sender, until one of them ends; the others are cancelled.

    Returns:
        The results of those that have ended.

    Raises:
        Exception: of one that has ended.
    """
    tasks = [asyncio.create_task(side) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # The tasks end before the call: writing to an ended call is an error.
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in done]


async def send_messages(stream: MessageStream, context: Any) -> None:
    """Write the messages of a stream until it ends."""
    while True:
        message, has_ended = stream.take()
        if has_ended:
            return
        if message is None:
            await stream.has_message.wait()
        else:
            await context.write(message)


def error_of(error: Exception) -> pb.Error:
    """An error on the wire."""
    kind = type(error).__name__ if isinstance(error, (CapacityError, InputError)) else "JobError"
    return pb.Error(kind=kind, message=str(error))


def kind_of(message: Message | None) -> str:
    """The kind of a message, for errors."""
    return "the end of the stream" if message is None else str(message.WhichOneof("kind") or "an empty message")


async def _tell(context: Any, message: Message) -> None:
    with suppress(grpc.aio.BaseError):  # the peer can be gone
        await context.write(message.SerializeToString())
