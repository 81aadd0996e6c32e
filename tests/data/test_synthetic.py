from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.types.schema import DataSchema, Feature, Table
from data.columns import Columns
from data.hashing import mix64
from data.synthetic import BLOCK_ROWS, SyntheticSource
from data.synthetic_options import SyntheticFeature, options_at
from data.testing import check_source
from data.zipf import ZipfLaw


def source(rows: int = 50, seed: int = 0) -> SyntheticSource:
    options = options_at("")
    return SyntheticSource(schema=options.schema, features=options.features, rows=rows, seed=seed)


def read(made: SyntheticSource) -> list[Columns]:
    return [made.read(block) for segment in made.segments() for block in made.blocks(segment)]


BAGS = SyntheticSource(
    schema=DataSchema(
        label="y",
        dense=(),
        features=tuple(Feature(name=name, table=name) for name in "abcd"),
        tables=(Table(name="a", rows=50), Table(name="b"), Table(name="c", rows=9, hash=True), Table(name="d")),
    ),
    features=(
        SyntheticFeature(law=ZipfLaw(vocabulary=50), bag=3),
        SyntheticFeature(law=ZipfLaw(vocabulary=2**40), missing=0.3),
        SyntheticFeature(law=ZipfLaw(vocabulary=1000), bag=4.5, bag_law="poisson"),
        SyntheticFeature(law=ZipfLaw(vocabulary=1000), bag=2.5, bag_law="geometric", missing=0.1),
    ),
    rows=BLOCK_ROWS + 100,
)


def test_blocks_are_pure_functions_of_the_seed() -> None:
    first, second, other = read(source(seed=1)), read(source(seed=1)), read(source(seed=2))
    assert first[0].values.tobytes() == second[0].values.tobytes()
    assert first[0].values.tobytes() != other[0].values.tobytes()


def test_more_rows_change_no_earlier_row() -> None:
    (short,) = read(source(rows=1000))
    long = read(source(rows=BLOCK_ROWS + 10))
    assert [part.num_rows for part in long] == [BLOCK_ROWS, 10]
    assert long[0].dense[:1000].tobytes() == short.dense.tobytes()
    assert long[0].lengths[:, :1000].tobytes() == short.lengths.tobytes()
    assert long[0].labels[:1000].tobytes() == short.labels.tobytes()
    assert long[0].values[:1000].tolist()[:900] == short.values[:900].tolist()
    assert long[0].dense.tobytes() != long[1].dense.tobytes()


def test_keeps_a_readers_promises() -> None:
    check_source(source())
    check_source(dataclasses.replace(BAGS, rows=40))


def test_bags_have_their_sizes_and_tables_their_ids() -> None:
    columns = read(BAGS)[0]
    assert BAGS.multi_hot == {"a", "c", "d"}
    lengths = columns.lengths
    assert set(lengths[0].tolist()) == {3}
    assert (lengths[1] == 0).mean() == pytest.approx(0.3, abs=0.02)
    assert lengths[2].mean() == pytest.approx(4.5, rel=0.02)
    assert lengths[2].min() == 1
    assert lengths[3][lengths[3] > 0].mean() == pytest.approx(2.5, rel=0.03)
    bounds = np.concatenate([[0], np.cumsum(lengths.sum(axis=1))])
    a, b, c, d = (columns.values[low:high] for low, high in pairwise(bounds))
    assert a.max() < 50
    assert set(c.tolist()) == set(range(9))
    for ids in (b, d):
        assert ids.min() >= 0
        assert ids.max() < 2**40
    assert len(columns.values) == lengths.sum()


def test_labels_have_the_rate_asked_for() -> None:
    for rate in (0.05, 0.25):
        made = dataclasses.replace(source(rows=4 * BLOCK_ROWS), label_rate=rate)
        labels = np.concatenate([part.labels for part in read(made)])
        assert labels.mean() == pytest.approx(rate, abs=0.04)


def auc(scores: NDArray[np.float64], labels: NDArray[np.float32]) -> float:
    """Mann and Whitney's statistic; scores are distinct."""
    ranks = np.argsort(np.argsort(scores)) + 1
    ones = labels == 1
    return float((ranks[ones].sum() - ones.sum() * (ones.sum() + 1) / 2) / (ones.sum() * (~ones).sum()))


def test_labels_can_be_learnt() -> None:
    """Dense values and, per feature, the smoothed click rate of the id (hashed), fitted by least squares."""
    train, held_out = (
        (np.concatenate([part.dense for part in parts]), np.concatenate([_one_hot(part) for part in parts], axis=1),
         np.concatenate([part.labels for part in parts]))
        for parts in (lambda all_: (all_[:-1], all_[-1:]))(read(source(rows=5 * BLOCK_ROWS)))
    )  # fmt: skip
    rates = []
    for feature in range(26):
        count = np.bincount(train[1][feature], minlength=2**16) + 20
        clicks = np.bincount(train[1][feature], weights=train[2], minlength=2**16) + 20 * train[2].mean()
        rates.append(clicks / count)

    def inputs(dense: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float64]:
        columns = [rates[feature][ids[feature]] for feature in range(26)]
        return np.column_stack([np.ones(len(dense)), dense, *columns])

    weights = np.linalg.lstsq(inputs(*train[:2]), train[2], rcond=None)[0]
    assert 0.68 < auc(inputs(*held_out[:2]) @ weights, held_out[2]) < 0.85
    dense_only = inputs(*held_out[:2])[:, :14] @ weights[:14]
    assert auc(dense_only, held_out[2]) > 0.6


def _one_hot(columns: Columns) -> NDArray[np.int64]:
    """int64 ``[26, n]`` ids hashed to 16 bits, 0 where missing."""
    ids = np.zeros(columns.lengths.shape, np.int64)
    ids[columns.lengths > 0] = (mix64(columns.values.view(np.uint64)) >> np.uint64(48)).astype(np.int64)
    return ids
