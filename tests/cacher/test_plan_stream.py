"""A planner thread and the event loop: bounded both ways, and ended from either side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import CodecError
from bagpipe.lookahead.frames import FrameKind, encode_spec
from bagpipe.lookahead.ids import encode_ids
from bagpipe.lookahead.link import Frame
from bagpipe.lookahead.pieces import PIECE_BYTES, FrameJoiner
from bagpipe.lookahead.protocol import Intake
from bagpipe.types.batch import Batch
from cacher.counters import Counters
from cacher.plan_stream import BUFFER_BYTES, PlanStream
from tests.lookahead.streams import batches_of, expected_parts, spec_of

SPEC = spec_of(num_slots=100, lookahead=1)
START = Frame(kind=FrameKind.START, run=1, data=bytearray(encode_spec(SPEC)))
END = Frame(kind=FrameKind.END, run=1, data=bytearray())


def ids(batch: Batch) -> Frame:
    return Frame(kind=FrameKind.BATCH, run=1, data=bytearray().join(encode_ids(batch)))


def served(work: Callable[[PlanStream], Coroutine[Any, Any, None]], intake: Any = Intake) -> PlanStream:
    """A stream after some work on its loop; its thread has ended."""

    async def serve() -> PlanStream:
        async with asyncio.timeout(60):
            stream = PlanStream("planner", intake, Counters())
            stream.start()
            try:
                await work(stream)
            finally:
                stream.close()
            assert await asyncio.to_thread(stream.join, 30)
            return stream

    return asyncio.run(serve())


async def taken(stream: PlanStream) -> bytes | None:
    """The next message; None once the planner has ended."""
    while True:
        message, has_ended = stream.take()
        if message is not None or has_ended:
            return message
        await stream.has_message.wait()


async def frame_of(stream: PlanStream) -> Frame:
    joiner = FrameJoiner(1 << 30)
    while True:
        message = await taken(stream)
        assert message is not None
        frame = joiner.add(pb.PlanReply.FromString(message).piece)
        if frame is not None:
            return frame


def test_frames_go_in_and_plans_come_out() -> None:
    batches = batches_of(5)

    async def work(stream: PlanStream) -> None:
        for frame in (START, *map(ids, batches), END):
            assert stream.put(frame)
        kinds = [(await frame_of(stream)).kind for _ in range(6)]
        assert kinds == [FrameKind.PLAN] * len(expected_parts(batches, SPEC)) + [FrameKind.END]

    assert served(work).error is None


def test_a_trainer_that_takes_nothing_stops_the_planner() -> None:
    """Everything that waits is within the two buffers, one message and three frames."""
    frame = ids(batches_of(1, size=60_000)[0])
    given = [0]

    async def work(stream: PlanStream) -> None:
        assert stream.put(START)
        index = 0
        while True:
            batch = Frame(kind=frame.kind, run=frame.run, data=bytearray(frame.data))
            batch.data[:8] = index.to_bytes(8, "little")
            if stream.put(batch):
                given[0] += len(batch.data)
                index += 1
                continue
            try:
                async with asyncio.timeout(1):  # the planner has stopped
                    await stream.has_room.wait()
            except TimeoutError:
                break
        num_out = 0
        while True:
            message, _ = stream.take()
            if message is None:
                break
            num_out += len(message)
        assert num_out <= BUFFER_BYTES + 2 * PIECE_BYTES
        # A plan of these ids is no smaller than half of them: 4 of 8 bytes for each.
        assert given[0] <= BUFFER_BYTES + 2 * (BUFFER_BYTES + 2 * PIECE_BYTES) + 3 * len(frame.data)

    assert served(work).error is None


def test_a_stream_that_is_closed_ends_a_planner_that_waits() -> None:
    async def work(stream: PlanStream) -> None:
        assert stream.put(START)

    assert served(work).error is None


@pytest.mark.parametrize(("error", "data"), [(CodecError, b"short"), (RuntimeError, b"")], ids=["malformed", "defect"])
def test_the_error_of_a_planner_ends_the_stream(error: type[Exception], data: bytes) -> None:
    class Failing(Intake):
        def batch(self, data: bytearray) -> Batch:
            if not data:
                raise RuntimeError("defect")
            return super().batch(data)

    async def work(stream: PlanStream) -> None:
        assert stream.put(START)
        assert stream.put(Frame(kind=FrameKind.BATCH, run=1, data=bytearray(data)))
        if error is RuntimeError:
            assert stream.put(END)
        assert await taken(stream) is None
        assert not stream.put(START)

    assert type(served(work, Failing).error) is error
