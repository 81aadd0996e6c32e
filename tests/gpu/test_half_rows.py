"""Half rows on a CUDA device have the CPU's bits: initial values, both roundings, and an update with them."""

from __future__ import annotations

import pytest
import torch

from bagpipe.kernels.initialization import TORCH_DTYPE, InitialWeights
from bagpipe.kernels.interface import RowNames, RowStep
from bagpipe.kernels.rounding import open_rounding
from bagpipe.kernels.row_format import host_words, open_row_format
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from bagpipe.types.schema import ROUNDINGS, RowSchema, RowTable

pytestmark = pytest.mark.gpu

NUM_ROWS, DIM = 4096, 6
TABLES = (RowTable(name="a", dim=DIM, init_bound=1e-4), RowTable(name="b", dim=DIM))


def schema_of(dtype: str, rounding: str, optimizer: str = "adagrad") -> RowSchema:
    return RowSchema(tables=TABLES, optimizer=optimizer, dtype=dtype, rounding=rounding, seed=3)


def names_on(device: str) -> RowNames:
    rows = torch.arange(NUM_ROWS)
    return RowNames(tables=(rows % 2).to(device, torch.int32), ids=(rows * 0x9E3779B97F4A7C1 - 7).to(device))


def values_of_all_sizes() -> torch.Tensor:
    """Normal and subnormal numbers, numbers beyond float16, zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(NUM_ROWS, DIM, generator=generator) * 2.0 ** torch.randint(
        -60, 20, (NUM_ROWS, DIM), generator=generator
    )
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65512.0, -65519.9, 3e-45, 1e-40, 2.0**-24])
    weights.view(-1)[: len(special)] = special
    return weights


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding(dtype: str, rounding: str, device: str) -> None:
    found = []
    for where in ("cpu", device):
        out = torch.zeros(NUM_ROWS, DIM, dtype=TORCH_DTYPE[dtype], device=where)
        rule = open_rounding(schema_of(dtype, rounding), torch.device(where))
        rule.write(values_of_all_sizes().to(where), out, names_on(where), 17)
        found.append(out.cpu())
    on_cpu, on_device = found
    assert torch.equal(on_cpu.isnan(), on_device.isnan())
    numbers = ~on_cpu.isnan()  # NaN bits are device-specific
    assert (on_cpu.view(torch.int16)[numbers] == on_device.view(torch.int16)[numbers]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_initial_values(dtype: str, device: str) -> None:
    found = []
    for where in ("cpu", device):
        names = names_on(where)
        out = torch.zeros(NUM_ROWS, DIM, dtype=TORCH_DTYPE[dtype], device=where)
        InitialWeights(schema_of(dtype, "nearest"), torch.device(where)).fill_(out, names.tables.long(), names.ids)
        found.append(host_words(out.cpu()).tobytes())
    assert found[0] == found[1]


def test_records_after_steps(device: str) -> None:
    """Opened, updated and closed on the device several times.

    With SGD: the other optimizers take square roots, which a CPU does not round correctly. See `test_kernels.py`.
    """
    schema = schema_of("bfloat16", "stochastic", "sgd")
    generator = torch.Generator().manual_seed(6)
    gradients = torch.randn(3, NUM_ROWS, DIM, generator=generator)
    found = []
    for where in ("cpu", device):
        row_format = open_row_format(schema, torch.device(where))
        rows = torch.zeros(NUM_ROWS, row_format.width(DIM), dtype=torch.bfloat16, device=where)
        for step, gradient in enumerate(gradients, 1):
            values = row_format.unpack(rows, DIM)
            numbers = RowStep(lr=0.05, eps=1e-7, step=step)
            ROW_OPTIMIZERS["sgd"].apply(values, gradient.to(where, copy=True), numbers)
            row_format.pack(values, rows, DIM, names_on(where), step)
        found.append(host_words(rows.cpu()).tobytes())
    assert found[0] == found[1]
