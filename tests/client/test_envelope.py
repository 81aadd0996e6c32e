"""A step written once is what protobuf would have written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import decode_step
from bagpipe.client.envelope import step_message
from bagpipe.oracle.rank_batch import RankBatch
from tests.client.rank_batches import assert_same, example_step, steps

NUMBERS = st.integers(0, 2**64 - 1)


@given(steps(), NUMBERS, NUMBERS)
def test_protobuf_reads_it(step: RankBatch, run: int, index: int) -> None:
    message = pb.CacherMessage.FromString(step_message(run, index, step))
    assert message.WhichOneof("kind") == "step"
    assert (message.step.run, message.step.index) == (run, index)
    assert_same(decode_step(bytearray(message.step.payload)), step)


def test_protobuf_writes_the_same() -> None:
    for size in (0, 1, 5, 100, 3000):
        written = step_message(3, 1 << 40, example_step(7, size))
        assert pb.CacherMessage.FromString(written).SerializeToString() == written
