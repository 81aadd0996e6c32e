"""Dense optimizers by name. Row optimizers are in `bagpipe.kernels.row_optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from bagpipe.config.sections import OptimConfig
from bagpipe.errors import InputError

__all__ = ["DENSE_OPTIMIZERS", "dense_optimizer"]

DENSE_OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter], OptimConfig], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, config: torch.optim.SGD(parameters, lr=config.dense_lr),
    "adagrad": lambda parameters, config: torch.optim.Adagrad(parameters, lr=config.dense_lr, eps=config.eps),
    "adam": lambda parameters, config: torch.optim.Adam(parameters, lr=config.dense_lr, eps=config.eps),
}


def dense_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """The dense optimizer named by the configuration."""
    if config.dense not in DENSE_OPTIMIZERS:
        raise InputError(f"optim.dense must be one of {', '.join(DENSE_OPTIMIZERS)}, got {config.dense!r}")
    return DENSE_OPTIMIZERS[config.dense](list(parameters), config)
