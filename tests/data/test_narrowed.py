"""A narrowed source has the same rows with fewer columns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.config.sections import DataConfig
from data.formats import open_source
from data.loader import LookaheadLoader
from data.narrowed import NarrowedSource, narrowed
from data.source import Source


def mlperf(tmp_path: Path) -> Source:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "day_0_dense.npy", rng.random((40, 3), np.float32))
    np.save(tmp_path / "day_0_labels.npy", rng.integers(0, 2, 40).astype(np.float32))
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **{str(n): rng.integers(0, 9, (40, n + 1)) for n in range(4)})
    return dataclasses.replace(open_source(DataConfig(format="mlperf-npz", path=str(tmp_path))), block_rows=16)  # type: ignore[type-var]


def synthetic(tmp_path: Path) -> Source:
    return open_source(DataConfig(format="synthetic"))


def batches_of(source: Source, **options: Any) -> list[Any]:
    with LookaheadLoader(source, batch_size=7, limit=40, **options) as loader:
        return list(loader)


@pytest.mark.parametrize("make", [mlperf, synthetic])
@pytest.mark.parametrize("features", [(), (2,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("dense", [True, False])
def test_a_narrowed_source_has_the_columns_asked_for(
    make: Any, features: tuple[int, ...], dense: bool, tmp_path: Path
) -> None:
    whole = make(tmp_path)
    part = narrowed(whole, features, dense=dense)
    assert part.layout == whole.layout
    assert [feature.name for feature in part.schema.features] == [whole.schema.features[n].name for n in features]
    for one, other in zip(batches_of(whole, shuffle=True), batches_of(part, shuffle=True), strict=True):
        starts = one.feature_offsets()
        parts = [one.values[starts[feature] : starts[feature + 1]] for feature in features]
        assert other.values.tolist() == np.concatenate([one.values[:0], *parts]).tolist()
        assert other.lengths.tolist() == one.lengths[list(features)].tolist()
        assert other.dense.tolist() == (one.dense if dense else one.dense[:, :0]).tolist()
        assert other.labels.tolist() == one.labels.tolist()
        assert other.reader_state == one.reader_state


def test_rows_that_are_skipped_are_decided_by_all_columns(tmp_path: Path) -> None:
    whole = dataclasses.replace(mlperf(tmp_path), bad_rows="skip")  # type: ignore[type-var]
    assert isinstance(narrowed(whole, (1,), dense=False), NarrowedSource)
    assert not isinstance(narrowed(mlperf(tmp_path), (1,), dense=False), NarrowedSource)
    assert narrowed(whole, range(4), dense=True) is whole
