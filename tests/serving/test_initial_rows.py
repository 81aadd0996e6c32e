"""The rule of new rows in numpy has the bits of the one in torch, which jobs use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.kernels.initialization import initial_weights
from bagpipe.serving.initial_rows import InitialRows
from bagpipe.types.schema import RowSchema, RowTable

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@given(
    ids=st.lists(INT64, max_size=5),
    seed=INT64,
    name=st.text(max_size=9),
    dim=st.integers(1, 9),
    bound=st.floats(1e-9, 100.0),
)
def test_new_rows_are_those_of_a_job(dtype: str, ids: list[int], seed: int, name: str, dim: int, bound: float) -> None:
    table = RowTable(name=name, dim=dim, init_bound=bound)
    array = np.array(ids, np.int64)
    expected = initial_weights(table, array, seed=seed, dtype=dtype)
    other = RowTable(name=f"{name}2", dim=2)
    found = InitialRows(RowSchema(tables=(other, table), optimizer="sgd", dtype=dtype, seed=seed)).weights(1, array)
    assert found.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_array_equal(found, expected.double().numpy())
