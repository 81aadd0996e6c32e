from __future__ import annotations

import math

import numpy as np
import pytest

from data.criteo_skew import COLUMNS, CRITEO_KAGGLE_ROWS, EXAMPLES_MEASURED, ColumnSkew, criteo_kaggle_rows


@pytest.mark.parametrize("column", COLUMNS, ids=[f"C{number}" for number in range(1, 27)])
def test_the_law_matches_the_measured_figures(column: ColumnSkew) -> None:
    accesses = round(EXAMPLES_MEASURED * (1 - column.missing))
    uniforms = np.random.Generator(np.random.Philox(1)).random(accesses)
    counts = np.sort(np.unique(column.law.ranks(uniforms), return_counts=True)[1])[::-1]
    assert counts.size == pytest.approx(column.distinct, rel=0.08)
    for share, measured in ((0.001, column.top_0_1), (0.01, column.top_1), (0.1, column.top_10)):
        top = counts[: math.ceil(share * counts.size)].sum() / accesses
        assert top == pytest.approx(measured, abs=0.04)


def test_published_sizes() -> None:
    assert sum(CRITEO_KAGGLE_ROWS) == 33_762_577
    assert criteo_kaggle_rows()["C3"] == 10_131_227
    assert len(COLUMNS) == len(CRITEO_KAGGLE_ROWS) == 26
