"""Messages are those of protobuf's own encoder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import decode_rank_batch
from bagpipe.client.message import encode_message
from bagpipe.oracle.rank_batch import RankBatch
from tests.client.rank_batches import assert_same, example_rank_batch, rank_batches
from tests.effort import at_most

NUMBERS = st.integers(0, 2**64 - 1)


@at_most(40)
@given(rank_batches(), NUMBERS, NUMBERS)
def test_protobuf_reads_a_message(rank_batch: RankBatch, run: int, index: int) -> None:
    message = pb.CacherMessage.FromString(encode_message(run, index, rank_batch))
    assert message.WhichOneof("kind") is None
    assert len(message.rank_batches) == 1
    assert (message.rank_batches[0].run, message.rank_batches[0].index) == (run, index)
    assert_same(decode_rank_batch(bytearray(message.rank_batches[0].payload)), rank_batch)


def test_joined_messages_are_one_message() -> None:
    parts = [encode_message(3, index, example_rank_batch(index, 5 * index)) for index in range(4)]
    message = pb.CacherMessage.FromString(b"".join(parts))
    assert [rank_batch.index for rank_batch in message.rank_batches] == [0, 1, 2, 3]
    assert [pb.CacherMessage(rank_batches=[each]).SerializeToString() for each in message.rank_batches] == parts


def test_protobuf_writes_the_same_bytes() -> None:
    for size in (0, 1, 5, 100, 3000):
        written = encode_message(3, 1 << 40, example_rank_batch(7, size))
        assert pb.CacherMessage.FromString(written).SerializeToString() == written
