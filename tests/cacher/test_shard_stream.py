"""The thread that indexes for a cacher: within its credits, from any batch, to the end of the data."""

from __future__ import annotations

import asyncio

import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.index_codec import decode_index
from bagpipe.errors import InputError
from cacher.counters import Counters
from cacher.planning import PlannedData
from cacher.shard_stream import IndexStream, ShardTask
from tests.cacher.daemons import config, spec_of


def task_of(next_batch: int, credits: int) -> ShardTask:
    job = config()
    data = PlannedData(job.data, job.run.seed)
    return data.shard_task(
        "train",
        spec_of(job, data.schema),
        [0, 3],
        next_batch=next_batch,
        reader_state=None,
        credits=credits,
        with_lengths=True,
        with_examples=True,
    )


async def next_of(stream: IndexStream) -> pb.IndexReply | None:
    """The next message; None at the end."""
    while True:
        message, has_ended = stream.take()
        if has_ended:
            return None
        if message is not None:
            return pb.IndexReply.FromString(message)
        await stream.has_message.wait()


def test_it_sends_no_more_than_the_credits_until_they_are_acknowledged() -> None:
    async def work() -> tuple[list[int], int]:
        stream = IndexStream(task_of(next_batch=5, credits=2), None, Counters())
        stream.start()
        found: list[int] = []
        while (message := await next_of(stream)) is not None and message.WhichOneof("kind") == "part":
            part = decode_index(message.part.payload)
            assert part.lengths is not None
            assert part.lengths.shape[0] == 2
            found.append(part.indexed.batch_index)
            if len(found) == 2:
                assert not stream.acknowledge(8)
                assert stream.take() == (None, False)
            if len(found) >= 2:
                assert stream.acknowledge(found[-1] + 1)
        assert message is not None
        assert await next_of(stream) is None
        assert stream.join(60)
        return found, message.end.next_batch

    assert asyncio.run(work()) == (list(range(5, 18)), 18)


def test_an_error_follows_the_batches_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> tuple[int, Exception | None]:
        task = task_of(next_batch=0, credits=99)
        index = task.indexer.index

        def failing(batch: object) -> object:
            if batch.index == 3:  # type: ignore[attr-defined]
                raise InputError("batch 3 is bad")
            return index(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(task.indexer, "index", failing)
        stream = IndexStream(task, None, Counters())
        stream.start()
        count = 0
        while await next_of(stream) is not None:
            count += 1
        return count, stream.error

    count, error = asyncio.run(work())
    assert (count, str(error)) == (3, "batch 3 is bad")
