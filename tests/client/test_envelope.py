"""A step written once is what protobuf would have written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import decode_rank_batch
from bagpipe.client.envelope import rank_batch_message
from bagpipe.oracle.rank_batch import RankBatch
from tests.client.rank_batches import assert_same, example_rank_batch, steps

NUMBERS = st.integers(0, 2**64 - 1)


@given(steps(), NUMBERS, NUMBERS)
def test_protobuf_reads_it(step: RankBatch, run: int, index: int) -> None:
    message = pb.CacherMessage.FromString(rank_batch_message(run, index, step))
    assert message.WhichOneof("kind") == "rank_batch"
    assert (message.rank_batch.run, message.rank_batch.index) == (run, index)
    assert_same(decode_rank_batch(bytearray(message.rank_batch.payload)), step)


def test_protobuf_writes_the_same() -> None:
    for size in (0, 1, 5, 100, 3000):
        written = rank_batch_message(3, 1 << 40, example_rank_batch(7, size))
        assert pb.CacherMessage.FromString(written).SerializeToString() == written
