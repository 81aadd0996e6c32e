"""Row optimizers of a configuration."""

from __future__ import annotations

from typing import get_args

import pytest

from bagpipe.config.optim_section import ROW_CHOICES, OptimConfig
from bagpipe.config.row_optimizers import ROW_OPTIMIZERS, row_optimizers
from bagpipe.optim import SGD, Adam, Frozen, Ftrl, Momentum
from bagpipe.types.schema import RowOptimizer


@pytest.mark.parametrize("name", ROW_CHOICES)
def test_a_name_is_that_of_its_optimizer(name: str) -> None:
    assert ROW_OPTIMIZERS[name](0.5, OptimConfig()).record == {"adamw": "adam"}.get(name, name)
    assert set(get_args(RowOptimizer)) < set(ROW_CHOICES) == set(ROW_OPTIMIZERS)
    decaying = ROW_OPTIMIZERS[name](0.5, OptimConfig(rows_weight_decay=0.25))
    assert decaying.numbers.get("weight_decay") == (None if name in ("ftrl", "frozen") else 0.25)


def test_tables_have_their_own_optimizer_and_rate() -> None:
    optim = OptimConfig(
        rows="adam",
        eps=1e-6,
        rows_by_table=("user=momentum", "item = ftrl", "shop=frozen"),
        rows_lr_by_table=("item=0.5", "topic=0.25"),
        rows_momentum=0.5,
        ftrl_l1=0.1,
    )
    assert row_optimizers(optim) == {
        "user": Momentum(0.02, momentum=0.5),
        "item": Ftrl(0.5, l1=0.1),
        "shop": Frozen(),
        "topic": Adam(0.25, eps=1e-6),
        "*": Adam(0.02, eps=1e-6),
    }
    assert row_optimizers(OptimConfig(rows="sgd")) == {"*": SGD(0.02)}
