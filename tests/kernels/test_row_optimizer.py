"""Row optimizers compared with torch's and torchrec's, and independence of a row from its neighbours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe import optim
from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from bagpipe.types.schema import DECAYED, FROZEN, OPTIMIZER_STATE_WIDTH, base_optimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

NUM_ROWS, DIM, LR, EPS = 23, 6, 0.05, 1e-7


class PlainFtrl(torch.optim.Optimizer):
    """Algorithm 1 of McMahan et al., KDD 2013, for the rows with a gradient; number by number in float64."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__([weight], {})
        self.z, self.n = torch.zeros_like(weight.data), torch.zeros_like(weight.data)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (w,) = self.param_groups[0]["params"]
        gradients = w.grad.coalesce()
        for row, gradient in zip(gradients.indices()[0].tolist(), gradients.values(), strict=True):
            for i, g in enumerate(gradient.tolist()):
                z, n = self.z[row, i].item(), self.n[row, i].item()
                sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / LR
                z, n = z + g - sigma * w[row, i].item(), n + g * g
                self.z[row, i], self.n[row, i] = z, n
                divisor = (0.5 + math.sqrt(n)) / LR + 0.125
                w[row, i] = 0.0 if abs(z) <= 0.25 else -(z - math.copysign(0.25, z)) / divisor


class RowsApart(torch.optim.Optimizer):
    """torch's optimizer, one for each row, which steps if its row has a gradient."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__([weight], {})
        self.rows = [nn.Parameter(row) for row in weight.data]  # views
        self.optimizers = [torch.optim.SGD([row], lr=LR, momentum=0.9) for row in self.rows]

    def step(self) -> None:  # type: ignore[override]
        gradients = self.param_groups[0]["params"][0].grad.coalesce()
        for row, gradient in zip(gradients.indices()[0].tolist(), gradients.values(), strict=True):
            self.rows[row].grad = gradient
            self.optimizers[row].step()


REFERENCES: dict[str, Callable[[Tensor], torch.optim.Optimizer]] = {
    "sgd": lambda weight: torch.optim.SGD([weight], lr=LR),
    "momentum": RowsApart,
    "adagrad": lambda weight: torch.optim.Adagrad([weight], lr=LR, eps=EPS),
    "rowwise_adagrad": lambda weight: RowWiseAdagrad([weight], lr=LR, eps=EPS),
    "adam": lambda weight: torch.optim.SparseAdam([weight], lr=LR, eps=EPS),
    "ftrl": PlainFtrl,
}


def numbers(step: int, lr: float = LR, eps: float = EPS) -> RowStep:
    return RowStep(lr=lr, eps=eps, step=step, momentum=0.9, beta=0.5, l1=0.25, l2=0.125)


def test_state_widths_are_the_schema_s() -> None:
    assert {name: optimizer.state_width(8) for name, optimizer in ROW_OPTIMIZERS.items()} == {
        "sgd": 0,
        "momentum": 8,
        "adagrad": 8,
        "rowwise_adagrad": 1,
        "adam": 16,
        "ftrl": 16,
    }
    plain = {name for name in OPTIMIZER_STATE_WIDTH if not base_optimizer(name)[1]}
    assert set(ROW_OPTIMIZERS) == plain - {FROZEN} == set(REFERENCES)
    widths = [OPTIMIZER_STATE_WIDTH[f"{name}{DECAYED}"](8) for name in ROW_OPTIMIZERS]
    assert widths == [optimizer.state_width(8) + 1 for optimizer in ROW_OPTIMIZERS.values()]


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
        ROW_OPTIMIZERS[name].apply(rows, grad.clone(), numbers(step))
        records[touched] = rows
    torch.testing.assert_close(records[:, :DIM], weight.detach(), rtol=tolerance, atol=tolerance)


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
    apply(together, grad.clone(), numbers(3))
    cut = data.draw(st.integers(0, num_rows))
    order = torch.randperm(num_rows, generator=generator)
    apart = torch.empty_like(rows)
    for part in (order[:cut], order[cut:]):
        some = rows[part]
        apply(some, grad[part], numbers(3))
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
            ROW_OPTIMIZERS[name].apply(some, grad.clone(), numbers(2))
            results.append(some)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


#: Row optimizers with the least numbers that they take.
LEAST = (
    optim.SGD(0.1),
    optim.Momentum(0.1, momentum=0.0),
    *(kind(0.1, eps=optim.LEAST_DIVISOR) for kind in (optim.Adagrad, optim.RowWiseAdagrad, optim.Adam)),
    optim.Ftrl(optim.LEAST_DIVISOR, beta=optim.LEAST_DIVISOR),
    optim.Ftrl(0.1, beta=0.0, l2=optim.LEAST_DIVISOR),
)


@pytest.mark.parametrize("optimizer", LEAST, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_step_of_a_gradient_of_0_is_finite(optimizer: optim.RowOptimizer, dtype: torch.dtype) -> None:
    """And that of a gradient whose square is 0 is no NaN."""
    gradients = torch.tensor([0.0, 0.0, 1e-30, -1e-23, 1e-200], dtype=dtype).reshape(-1, 1).expand(-1, 3)
    step = RowStep(lr=optimizer.rate(0), eps=optimizer.epsilon, step=1, **optimizer.numbers)
    rule = ROW_OPTIMIZERS[optimizer.name]
    rows = torch.zeros(5, 3 + rule.state_width(3), dtype=dtype)
    rows[1:, :3] = 0.5
    for _ in range(3):
        rule.apply(rows, gradients.clone(), step)
        assert bool(rows[:2].isfinite().all())
        assert not bool(rows.isnan().any())
