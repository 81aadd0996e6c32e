"""Frames of a shard's index."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bagpipe.client.codec import CodecError
from bagpipe.client.index_codec import ShardPart, decode_index, encode_index
from bagpipe.oracle.batch_indexer import BatchIndexer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.shard import shard_spec
from tests.oracle.batches import make_batch

SPEC = OracleSpec(
    table_rows=(None, None, None),
    features=tuple(FeatureRef(feature=number, table=number) for number in range(3)),
    num_slots=9,
    lookahead=4,
)
BATCHES = [make_batch(number, [[[5, 5], [6]], [[], [1]], [[2**62], [-1]]]) for number in (3, 4)]


def part_of(world_size: int, most: int = 2) -> ShardPart:
    indexer = BatchIndexer(shard_spec(dataclasses.replace(SPEC, world_size=world_size), {0, 2}, [0, 2]))
    narrow = [dataclasses.replace(batch, values=batch.values[[0, 1, 2, 4, 5]]) for batch in BATCHES]
    narrow = [dataclasses.replace(batch, lengths=batch.lengths[[0, 2]]) for batch in narrow]
    _, indexed = [indexer.index(batch) for batch in narrow]
    return ShardPart(indexed=indexed, lengths=np.array([[most, 1], [1, 1]], np.int32))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("most", [2, 300])
def test_a_part_survives(world_size: int, most: int) -> None:
    part = part_of(world_size, most)
    found = decode_index(b"".join(encode_index(part, with_examples=True)))
    assert repr(found) == repr(part)
    told = dataclasses.replace(part.indexed, next_use=np.arange(len(part.indexed.unique), dtype=np.int32))
    told_part = dataclasses.replace(part, indexed=told)
    assert repr(decode_index(b"".join(encode_index(told_part, with_examples=True)))) == repr(told_part)
    ones = decode_index(
        b"".join(encode_index(dataclasses.replace(part, lengths=np.ones((2, 2), np.int32)), with_examples=True))
    )
    assert ones.is_one_hot
    assert repr(ones.lengths) == repr(np.ones((2, 2), np.int32))
    bare = decode_index(b"".join(encode_index(ShardPart(indexed=part.indexed), with_examples=False)))
    assert bare.lengths is None
    assert all(rank.examples.shape == (0,) for rank in bare.indexed.rank_indexes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_no_index_is_refused(world_size: int) -> None:
    frame = b"".join(encode_index(part_of(world_size), with_examples=True))
    for size in range(0, len(frame) - 7, 7):  # the last bytes are padding
        with pytest.raises(CodecError, match="malformed index"):
            decode_index(frame[:size])
    for old, new in ((b"BPI1", b"BPS1"), (b'"ranks"', b'"ranls"'), (b'"batch": 4', b'"batch": x')):
        with pytest.raises(CodecError, match="malformed index"):
            decode_index(frame.replace(old, new))


def test_arrays_that_do_not_fit_are_refused() -> None:
    part = part_of(1)
    assert part.indexed.whole is not None
    whole = dataclasses.replace(part.indexed.whole, offsets=part.indexed.whole.offsets + np.int32(1))
    broken = ShardPart(indexed=dataclasses.replace(part.indexed, whole=whole))
    with pytest.raises(CodecError, match="do not fit each other"):
        decode_index(b"".join(encode_index(broken, with_examples=True)))
    down = part.indexed.whole.offsets.copy()
    down[1:-1] = down[1:-1][::-1] + 1
    broken = ShardPart(indexed=dataclasses.replace(part.indexed, whole=dataclasses.replace(whole, offsets=down)))
    with pytest.raises(CodecError, match="do not fit each other"):
        decode_index(b"".join(encode_index(broken, with_examples=True)))
