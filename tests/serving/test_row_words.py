from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bagpipe.errors import InputError
from bagpipe.serving.row_words import code_rows, narrow, widen

FLOATS = st.floats(width=32, allow_nan=False)


@given(values=arrays.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
def test_half_words_are_those_of_torch(values: np.ndarray) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        halves = torch.from_numpy(values).to(dtype)
        with np.errstate(over="ignore"):  # beyond the largest half, which is infinite in both
            words = narrow(values, name)
        is_nan = np.isnan(values)
        np.testing.assert_array_equal(words[~is_nan], halves.view(torch.uint16).numpy()[~is_nan])
        np.testing.assert_array_equal(widen(words, name), halves.float().numpy())


@given(values=arrays.arrays(np.float32, (4, 6), elements=st.floats(-1000, 1000, width=32)))
def test_rows_of_8_bits_are_within_half_a_step(values: np.ndarray) -> None:
    coded = code_rows(values)
    decoded = coded.decoded().astype(np.float64)
    step = (values.max(1) - values.min(1)).astype(np.float64)[:, None] / 255
    rounding = np.abs(values).max(1, keepdims=True) * 2.0**-22 + 2.0**-149
    assert (np.abs(decoded - values) <= step / 2 * (1 + 2.0**-16) + rounding).all()
    constant = np.repeat(values[:, :1], 6, axis=1)
    np.testing.assert_array_equal(code_rows(constant).decoded(), constant)
    assert code_rows(values[:0]).codes.shape == (0, 6)


def test_rows_of_8_bits_are_finite() -> None:
    with pytest.raises(InputError, match="finite"):
        code_rows(np.array([[1.0, np.nan]], np.float32))
