"""Ids as bytes, and the ranks' batches as one."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client.codec import CodecError
from bagpipe.lookahead.ids import concatenate, decode_ids, empty_batch, encode_ids
from bagpipe.types.batch import Batch
from tests.lookahead.streams import batch_of, plain
from tests.oracle.batches import make_batch


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A batch: ragged or one-hot, with or without examples and features."""
    num_features, num_examples = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    most = draw(st.sampled_from([1, 3]))
    bag = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=most == 1, max_size=most)
    feature = st.lists(bag, min_size=num_examples, max_size=num_examples)
    bags = draw(st.lists(feature, min_size=num_features, max_size=num_features))
    return make_batch(draw(st.integers(0, 2**40)), bags)


def bags_of(batch: Batch) -> list[list[list[int]]]:
    """``bags[feature][example] = [ids]``."""
    ids = iter(batch.values.tolist())
    return [[[next(ids) for _ in range(length)] for length in lengths] for lengths in batch.lengths.tolist()]


@given(batches(), st.lists(st.integers(0, 9), max_size=3))
def test_round_trip(batch: Batch, rank_examples: list[int]) -> None:
    batch = dataclasses.replace(batch, rank_examples=tuple(rank_examples))
    frame = bytearray().join(encode_ids(batch))
    assert len(frame) % 8 == 0
    assert plain(decode_ids(frame)) == plain(batch)


def test_one_hot_lengths_do_not_travel() -> None:
    assert sum(map(len, encode_ids(batch_of(0, *range(100))))) == 8 * (6 + 100)


@given(st.lists(batches(), min_size=1, max_size=4))
def test_examples_are_concatenated_in_rank_order(parts: list[Batch]) -> None:
    num_features = parts[0].num_features
    parts = [part if part.num_features == num_features else empty_batch(0, num_features) for part in parts]
    whole = concatenate(parts)
    assert whole.rank_examples == tuple(part.num_examples for part in parts)
    expected = [list(itertools.chain(*bags)) for bags in zip(*map(bags_of, parts), strict=True)]
    assert bags_of(whole) == expected
    assert (whole.index, whole.dense.shape, whole.labels.shape) == (
        parts[0].index,
        (whole.num_examples, 0),
        (whole.num_examples,),
    )
    start = 0
    for part in parts:
        selected = whole.select(np.arange(start, start + part.num_examples))
        assert plain(selected.values) == plain(part.values)
        assert plain(selected.lengths) == plain(part.lengths)
        start += part.num_examples


def test_parts_without_features() -> None:
    assert concatenate([empty_batch(3, 0), empty_batch(3, 0)]).lengths.shape == (0, 0)


@pytest.mark.parametrize("num_features", [0, 2])
def test_an_empty_batch(num_features: int) -> None:
    batch = empty_batch(7, num_features)
    assert (batch.index, batch.num_examples, batch.num_features) == (7, 0, num_features)
    assert plain(decode_ids(bytearray().join(encode_ids(batch)))) == plain(batch)


@given(batches(), st.integers(0, 5), st.integers(-(2**63), 2**63 - 1))
def test_a_header_that_does_not_fit_the_frame_is_refused(batch: Batch, word: int, value: int) -> None:
    frame = bytearray().join(encode_ids(batch))
    header = np.frombuffer(frame, np.int64, 6)
    before = header[word]
    header[word] = value
    try:
        found = decode_ids(frame)
    except CodecError:
        assert word != 0 or value < 0
        return
    # Another index, or sizes that lead to the same length.
    assert word == 0 or value == before or found.values.size + found.lengths.size <= len(frame)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(frame: bytes) -> None:
    try:
        found = decode_ids(bytearray(frame))
    except CodecError:
        return
    assert found.values.size * 8 <= len(frame)
