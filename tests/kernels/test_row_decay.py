"""Rows that decay when they are used, against rows that decay at every step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.kernels.row_decay import DecayTable, Missed, decay_factor, row_steps, set_row_steps

CPU = torch.device("cpu")
rates = st.lists(st.floats(0.0, 0.9) | st.floats(0.0, 1e-6), min_size=1, max_size=80)


def table_of(products: list[float]) -> DecayTable:
    table = DecayTable(CPU)
    for product in products:
        table.append(decay_factor(product, 1.0))
    return table


@given(rates, st.data())
def test_missed_steps_equal_a_multiplication_at_every_step(products: list[float], data: st.DataObject) -> None:
    table = table_of(products)
    until = data.draw(st.integers(0, len(products)))
    steps = data.draw(st.lists(st.integers(0, until), min_size=1, max_size=9))
    weights = torch.tensor([[1.5, -0.75]] * len(steps), dtype=torch.float64)
    eager = weights.clone()
    for row, first in enumerate(steps):
        for product in products[first:until]:
            eager[row] *= 1 - product
    Missed(table=table, until=until).apply(weights, 2, torch.tensor(steps))
    torch.testing.assert_close(weights, eager, rtol=1e-13, atol=1e-300)


@given(rates, st.integers(0, 80))
def test_a_table_of_a_checkpoint_goes_on_with_the_same_bits(products: list[float], cut: int) -> None:
    whole, before = table_of(products), table_of(products)
    resumed = DecayTable(CPU, before.state(min(cut, len(products))))
    for product in products[cut:]:
        resumed.append(decay_factor(product, 1.0))
    steps = torch.arange(len(products) + 1)
    assert torch.equal(whole.missed(steps, len(products)), resumed.missed(steps, len(products)))


def test_a_product_below_every_float_is_no_obstacle() -> None:
    """0.9 ** 20,000 is 10 ** -915; a row that missed a part of it has the factor of this part."""
    table = table_of([0.1] * 20_000)
    found = table.missed(torch.tensor([0, 19_000, 19_999, 20_000]), 20_000)
    expected = [0.0, math.exp(1000 * math.log(0.9)), 0.9, 1.0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert found[3] == 1.0


@pytest.mark.parametrize(("lr", "decay"), [(2.0, 0.5), (10.0, 1.0), (math.inf, 1.0)])
def test_a_rate_that_would_turn_the_sign_is_refused(lr: float, decay: float) -> None:
    with pytest.raises(InputError, match=f"expected a product below 1, got {lr:g}"):
        decay_factor(lr, decay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_integers_in_the_bits_of_a_record(dtype: torch.dtype) -> None:
    """Exact beyond the integers of float32, and 0 in a new row."""
    records = torch.zeros(3, 4, dtype=dtype)
    assert row_steps(records, 3).tolist() == [0, 0, 0]
    set_row_steps(records[1:2], 3, 2**24 + 1)
    assert row_steps(records.clone(), 3).tolist() == [0, 2**24 + 1, 0]
    assert torch.equal(records[:, :3], torch.zeros(3, 3, dtype=dtype))
