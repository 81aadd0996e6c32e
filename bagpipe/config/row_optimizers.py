"""`row_optimizers`: the row optimizers of a configuration, by table.

optim.rows, rows_by_table ──kind──┐
optim.rows_lr, rows_lr_by_table ──┴──> `bagpipe.optim.RowOptimizer` by table name, "*": the others
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bagpipe.config.optim_section import OptimConfig, pairs
from bagpipe.optim import OTHERS, SGD, Adagrad, Adam, AdamW, Frozen, Ftrl, Momentum, RowOptimizer, RowWiseAdagrad

__all__ = ["ROW_OPTIMIZERS", "row_optimizers"]


def _decay(config: OptimConfig) -> dict[str, Any]:
    return {"weight_decay": config.rows_weight_decay, "decoupled": config.rows_decay_kind == "decoupled"}


#: Row optimizer -> its constructor with a learning rate.
ROW_OPTIMIZERS: Mapping[str, Callable[[float, OptimConfig], RowOptimizer]] = {
    "sgd": lambda lr, config: SGD(lr, **_decay(config)),
    "momentum": lambda lr, config: Momentum(lr, momentum=config.rows_momentum, **_decay(config)),
    "adagrad": lambda lr, config: Adagrad(lr, eps=config.eps, **_decay(config)),
    "rowwise_adagrad": lambda lr, config: RowWiseAdagrad(lr, eps=config.eps, **_decay(config)),
    "adam": lambda lr, config: Adam(lr, eps=config.eps, **_decay(config)),
    "adamw": lambda lr, config: AdamW(lr, eps=config.eps, **_decay(config)),
    "ftrl": lambda lr, config: Ftrl(lr, beta=config.ftrl_beta, l1=config.ftrl_l1, l2=config.ftrl_l2),
    "frozen": lambda lr, config: Frozen(),
}


def row_optimizers(config: OptimConfig) -> Mapping[str, RowOptimizer]:
    """The row optimizers named by the configuration, by table; ``"*"`` stands for all tables that are not named."""
    kinds, rates = dict(pairs(config.rows_by_table)), dict(pairs(config.rows_lr_by_table))
    return {
        table: ROW_OPTIMIZERS[kinds.get(table, config.rows)](float(rates.get(table, config.rows_lr)), config)
        for table in dict.fromkeys((*kinds, *rates, OTHERS))
    }
