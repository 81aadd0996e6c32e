from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.types.batch import Batch


def batch_of(lengths: np.ndarray, *, weighted: bool) -> Batch:
    """A batch of distinct, ascending ids and weights."""
    num_ids = int(lengths.sum())
    num_examples = lengths.shape[1]
    return Batch(
        index=7,
        dense=np.arange(2 * num_examples, dtype=np.float32).reshape(num_examples, 2),
        values=np.arange(num_ids, dtype=np.int64),
        lengths=lengths.astype(np.int32),
        labels=np.arange(num_examples, dtype=np.float32),
        weights=np.arange(num_ids, dtype=np.float32) / 2 if weighted else None,
        times_s=10 * np.arange(num_examples, dtype=np.int64),
    )


def bags_of(batch: Batch) -> list[list[list[int]]]:
    ids = iter(batch.values.tolist())
    return [[[next(ids) for _ in range(length)] for length in lengths] for lengths in batch.lengths.tolist()]


@given(st.data())
def test_selects_the_bags_of_the_examples(data: st.DataObject) -> None:
    num_features, num_examples = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 7))
    longest = data.draw(st.sampled_from([1, 3]))
    shortest = data.draw(st.sampled_from([0, 1]))
    lengths = data.draw(
        st.lists(
            st.integers(shortest, longest), min_size=num_features * num_examples, max_size=num_features * num_examples
        )
    )
    batch = batch_of(
        np.array(lengths, dtype=np.int32).reshape(num_features, num_examples), weighted=data.draw(st.booleans())
    )
    if data.draw(st.booleans()):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, num_examples)] * 2)))
        examples = list(range(start, stop))
    else:
        examples = sorted(data.draw(st.sets(st.integers(0, num_examples - 1)))) if num_examples else []
    part = batch.select(np.array(examples, dtype=np.int32))
    assert bags_of(part) == [[bags[example] for example in examples] for bags in bags_of(batch)]
    assert part.index == 7
    assert part.num_features == num_features
    assert part.labels.tolist() == examples
    assert part.times_s is not None
    assert part.times_s.tolist() == [10 * example for example in examples]
    assert part.dense.tolist() == batch.dense[examples].tolist()
    assert part.lengths.flags.c_contiguous
    assert part.values.flags.c_contiguous
    if batch.weights is None:
        assert part.weights is None
    else:
        assert part.weights is not None
        assert part.weights.tolist() == (part.values / 2).tolist()
    arrays = (part.values, part.lengths, part.labels, part.dense)
    assert [array.dtype for array in arrays] == [np.int64, np.int32, np.float32, np.float32]


@pytest.mark.parametrize("examples", [[0, 1, 2], [1], []])
def test_a_feature_without_ids_stays(examples: list[int]) -> None:
    part = batch_of(np.array([[1, 1, 1], [0, 0, 0]]), weighted=False).select(np.array(examples, dtype=np.int32))
    assert part.lengths.tolist() == [[1] * len(examples), [0] * len(examples)]
    assert part.feature_offsets().tolist() == [0, len(examples), len(examples)]
