"""`pooling_arrays`: bags of one id each have the arrays of bags of any length, where these have any."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.cache.lookup_layout import Pooling, TableGroup, TableLookup
from bagpipe.cache.pooling import PoolingArrays, pooling_arrays


def _arrays(pooling: Pooling, lengths: list[list[int]], inverse: list[int], *, weighted: bool = False) -> PoolingArrays:
    group = TableGroup(
        index=0,
        lookup=TableLookup(pooling=pooling, weighted=weighted),
        dim=4,
        first_table=0,
        end_table=1,
        first_segment=0,
        end_segment=len(lengths),
    )
    order = np.argsort(inverse, kind="stable").astype(np.int32)
    return pooling_arrays(group, np.array(lengths, np.int32), np.array(inverse, np.int32), order)


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_one_id(weighted: bool) -> None:
    """An empty example behind them makes the bags those of any length."""
    one = _arrays("sum", [[1, 1], [1, 1]], [3, 1, 0, 2], weighted=weighted)
    any_length = _arrays("sum", [[1, 1, 0], [1, 1, 0]], [3, 1, 0, 2], weighted=weighted)
    assert one.inverse.tolist() == any_length.inverse.tolist() == [3, 0, 1, 2]
    assert one.sources.tolist() == any_length.sources.tolist() == [1, 2, 3, 0]
    if weighted:
        assert one.bag_order is not None
        assert any_length.bag_order is not None
        assert one.bag_order.tolist() == any_length.bag_order.tolist() == [0, 2, 1, 3]
    else:
        assert one.bag_offsets is one.bag_order is one.bags is None


def test_means_have_the_reciprocals_of_their_lengths() -> None:
    arrays = _arrays("mean", [[2, 0], [1, 4]], [5, 4, 3, 2, 1, 0, 2])
    assert arrays.coefficients is not None
    assert arrays.coefficients.tolist() == [0.25, 0.25, 0.25, 0.25, 1.0, 0.5, 0.5]
    assert arrays.bag_offsets is not None
    assert arrays.bag_offsets.tolist() == [0, 2, 3, 3, 7]
