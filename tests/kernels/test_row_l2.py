"""Updates that rows have missed, against updates of all rows at every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_l2 import L2Table
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH
from tests.system.plain_rows import STATES, PlainRows

DIM, NUM_STEPS = 3, 30


def steps() -> list[RowStep]:
    return [
        RowStep(lr=0.2 / (1 + b), eps=1e-3, step=b + 1, momentum=0.8, weight_decay=0.5, is_l2=True)
        for b in range(NUM_STEPS)
    ]


def eager(name: str, start: Tensor) -> list[Tensor]:
    """Records after every step, without the step they are at."""
    weight = nn.Parameter(start.clone())
    plain = PlainRows([weight], name=name, lr=1.0, eps=1e-3, momentum=0.8, decay=0.5)
    found = []
    for step in steps():
        found.append(torch.cat([weight.detach(), *(plain.state[weight][each] for each in STATES[name])], dim=1))
        plain.param_groups[0]["lr"] = step.lr
        plain.step()
    return found


@pytest.mark.parametrize("name", [name for name in STATES if name != "ftrl"])
def test_missed_updates_equal_an_update_at_every_step(name: str) -> None:
    """Rows at different steps; also from a table that a checkpoint kept."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(12, DIM, dtype=torch.float64, generator=generator)
    table = L2Table(name)
    for step in steps():
        table.append(step)
    expected = eager(name, start)
    at, until = torch.randint(0, 20, (12,), generator=generator), 25
    rows = torch.zeros(12, DIM + OPTIMIZER_STATE_WIDTH[f"{name}_l2"](DIM), dtype=torch.float64)
    for row, step_of_row in enumerate(at.tolist()):
        rows[row, :-1] = expected[step_of_row][row]
    resumed = rows.clone()
    table.apply(rows, DIM, at, until)
    torch.testing.assert_close(rows[:, :-1], expected[until], rtol=1e-12, atol=1e-12)
    L2Table(name, table.state(until)).apply(resumed, DIM, at, until)
    assert torch.equal(rows, resumed)
    table.apply(rows[:0], DIM, at[:0], until)
