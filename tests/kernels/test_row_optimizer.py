"""Row optimizers compared with torch's and torchrec's, and independence of a row from its neighbours."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from bagpipe.types.schema import FROZEN, OPTIMIZER_STATE_WIDTH

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

NUM_ROWS, DIM, LR, EPS = 23, 6, 0.05, 1e-7

REFERENCES: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "sgd": lambda weight: torch.optim.SGD([weight], lr=LR),
    "adagrad": lambda weight: torch.optim.Adagrad([weight], lr=LR, eps=EPS),
    "rowwise_adagrad": lambda weight: RowWiseAdagrad([weight], lr=LR, eps=EPS),
    "adam": lambda weight: torch.optim.SparseAdam([weight], lr=LR, eps=EPS),
}


def test_state_widths_are_the_schema_s() -> None:
    assert {name: optimizer.state_width(8) for name, optimizer in ROW_OPTIMIZERS.items()} == {
        "sgd": 0,
        "adagrad": 8,
        "rowwise_adagrad": 1,
        "adam": 16,
    }
    assert set(ROW_OPTIMIZERS) == set(OPTIMIZER_STATE_WIDTH) - {FROZEN} == set(REFERENCES)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 3e-6)])
@pytest.mark.parametrize("name", list(ROW_OPTIMIZERS))
def test_equals_the_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Eight batches, each touching some rows; untouched rows and their state do not change."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(NUM_ROWS, DIM, dtype=dtype, generator=generator)
    weight = nn.Parameter(start.clone())
    optimizer = REFERENCES[name](weight)
    records = torch.cat([start, torch.zeros(NUM_ROWS, OPTIMIZER_STATE_WIDTH[name](DIM), dtype=dtype)], dim=1)
    for step in range(1, 9):
        touched = torch.randperm(NUM_ROWS, generator=generator)[:11].sort().values
        grad = torch.randn(11, DIM, dtype=dtype, generator=generator)
        sparse = torch.sparse_coo_tensor(touched[None], grad, (NUM_ROWS, DIM), is_coalesced=True, check_invariants=True)
        weight.grad = sparse.to_dense() if name == "rowwise_adagrad" else sparse
        with torch.sparse.check_sparse_tensor_invariants():
            optimizer.step()
        rows = records[touched]
        ROW_OPTIMIZERS[name].apply(rows, grad.clone(), LR, EPS, step)
        records[touched] = rows
    torch.testing.assert_close(records[:, :DIM], weight.detach(), rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(ROW_OPTIMIZERS)),
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_a_row_does_not_depend_on_its_block(
    name: str, dim: int, num_rows: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Any split and any order of the rows gives the same bits: whole vectors, tails, one row alone."""
    generator = torch.Generator().manual_seed(num_rows * 100 + dim)
    width = dim + OPTIMIZER_STATE_WIDTH[name](dim)
    rows = torch.rand(num_rows, width, dtype=dtype, generator=generator)
    grad = torch.randn(num_rows, dim, dtype=dtype, generator=generator)
    apply = ROW_OPTIMIZERS[name].apply
    together = rows.clone()
    apply(together, grad.clone(), 0.1, 1e-8, 3)
    cut = data.draw(st.integers(0, num_rows))
    order = torch.randperm(num_rows, generator=generator)
    apart = torch.empty_like(rows)
    for part in (order[:cut], order[cut:]):
        some = rows[part]
        apply(some, grad[part], 0.1, 1e-8, 3)
        apart[part] = some
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", list(ROW_OPTIMIZERS))
def test_threads_do_not_matter(name: str) -> None:
    num_rows, dim = 4001, 33  # above torch's grain size, so that a second thread gets work
    rows = torch.rand(num_rows, dim + OPTIMIZER_STATE_WIDTH[name](dim))
    grad = torch.randn(num_rows, dim)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            some = rows.clone()
            ROW_OPTIMIZERS[name].apply(some, grad.clone(), 0.1, 1e-8, 2)
            results.append(some)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
