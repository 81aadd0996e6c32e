"""`StreamLink`: the training process's end of a link to a planner in a cacher, over one `Plan` stream.

    send ──queue──> gRPC's thread: pieces ──> cacher          receive <── pieces joined <── cacher

The queue holds references to the ids of the batches that are sent and not yet planned. gRPC's flow control decides when
a piece is made of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import Address
from bagpipe.client.agreement import MAX_IDS_BYTES, MAX_PLAN_BYTES, PROTOCOL_VERSION
from bagpipe.client.link import Credentials, LinkLost, Stream
from bagpipe.errors import InputError, JobError
from bagpipe.lookahead.link import Frame
from bagpipe.lookahead.pieces import FrameJoiner, pieces_of

__all__ = ["StreamLink"]


class StreamLink:
    """A `FrameLink`. For one thread.

    Args:
        address, credentials: of the cacher.
        job_id: of this process.
    """

    def __init__(self, address: Address, credentials: Credentials, job_id: str) -> None:
        self._address = address
        self._outbox: queue.SimpleQueue[tuple[int, int, Sequence[Any]] | None] = queue.SimpleQueue()
        hello = pb.PlanHello(protocol=PROTOCOL_VERSION, job_id=job_id)
        self._stream = Stream(address, credentials, "Plan", self._requests(hello))
        self._replies = self._stream.messages()
        self._joiner = FrameJoiner(MAX_PLAN_BYTES)

    def await_welcome(self, timeout_s: float) -> None:
        """Wait until the cacher has accepted this process.

        Raises:
            LinkLost: it was not reached, or did not answer in time.
            InputError, JobError: it refused; or see `Stream.messages`.
        """
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self._stream.cancel()

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            self._reply("welcome")
        except LinkLost:
            if is_late.is_set():
                raise LinkLost("it did not answer") from None
            raise
        finally:
            timer.cancel()
            timer.join()

    def send(self, kind: int, run: int, parts: Sequence[Any] = ()) -> None:
        """See `FrameLink`. Does not wait.

        Raises:
            InputError: the frame is larger than the cacher takes.
        """
        num_bytes = sum(map(len, parts))
        if num_bytes > MAX_IDS_BYTES:
            raise InputError(
                f"a batch has {num_bytes >> 20} MiB of ids, a cacher takes at most {MAX_IDS_BYTES >> 20} MiB: bring "
                "smaller batches"
            )
        self._outbox.put((kind, run, parts))

    def receive(self) -> Frame:
        """See `FrameLink`.

        Raises:
            LinkLost: the cacher is gone.
            InputError, JobError: see `Stream.messages`, or what the cacher said.
            CodecError: it does not keep to the protocol.
        """
        while (frame := self._joiner.add(self._reply("piece").piece)) is None:
            pass
        return frame

    def close(self) -> None:
        """End the stream. The cacher frees what it holds for it. Idempotent."""
        self._outbox.put(None)
        self._stream.__exit__(None, None, None)

    def _reply(self, kind: str) -> pb.PlanReply:
        reply: pb.PlanReply | None = next(self._replies, None)
        if reply is None:
            raise LinkLost("it ended the stream")
        found = reply.WhichOneof("kind")
        if found == "error":
            error = InputError if reply.error.kind == "InputError" else JobError
            raise error(reply.error.message)
        if found != kind:
            raise JobError(f"what listens at {self._address} sent {found or 'an empty message'}, expected {kind}")
        return reply

    def _requests(self, hello: pb.PlanHello) -> Iterator[pb.PlanRequest]:
        yield pb.PlanRequest(hello=hello)
        for kind, run, parts in iter(self._outbox.get, None):
            for piece in pieces_of(kind, run, parts):
                yield pb.PlanRequest(piece=piece)
