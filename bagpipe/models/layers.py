"""Layers that several models share, in plain torch: `mlp`, `NumericVectors`, and the initial values of FuxiCTR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError

__all__ = ["FUXICTR_INIT_BOUND", "NumericVectors", "mlp", "pooled_width", "reset_like_fuxictr"]

#: Bound of uniform initial rows with the standard deviation of FuxiCTR's normal ones, 1e-4.
FUXICTR_INIT_BOUND = math.sqrt(3) * 1e-4


def mlp(
    widths: Sequence[int], *, dropout: float = 0.0, batch_norm: bool = False, outputs: int | None = None
) -> nn.Sequential:
    """Hidden layers of linear map, batch norm, ReLU and dropout, in FuxiCTR's order; then a linear output layer.

    Raises from its forward `InputError`, if a batch norm gets one example in training.

    Args:
        widths: the input's width, then those of the hidden layers.
        dropout: share of a hidden layer's values that are zeroed in training; 0: none.
        batch_norm: normalise each hidden layer over the examples of a rank, before the ReLU.
        outputs: width of the output layer; None: no output layer.
    """
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers.append(nn.Linear(before, after))
        if batch_norm:
            layers.append(_batch_norm(after))
        layers.append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
    if outputs is not None:
        layers.append(nn.Linear(widths[-1], outputs))
    return nn.Sequential(*layers)


def _batch_norm(width: int) -> nn.BatchNorm1d:
    """Batch norm that refuses a single example in one line; as a hook, so that the module stays torch's."""
    norm = nn.BatchNorm1d(width)
    norm.register_forward_pre_hook(_need_examples)
    return norm


def _need_examples(module: nn.Module, arguments: tuple[Tensor]) -> None:
    if module.training and len(arguments[0]) == 1:
        raise InputError(
            "model.batch_norm: a rank needs at least 2 examples of every batch, got 1; choose data.batch_size or "
            "data.limit so that the last batch has more"
        )


class NumericVectors(nn.Module):
    """A learned vector for each dense column, times the column's value: FuxiCTR's embedding of numeric fields.

    Args:
        num_columns: number of dense columns.
        dim: dimension of the vectors.
    """

    def __init__(self, num_columns: int, dim: int) -> None:
        super().__init__()
        # A column is a linear map of one input there, with Glorot's normal initial weights.
        self.weight = nn.Parameter(torch.randn(num_columns, dim) * math.sqrt(2 / (1 + dim)))

    def forward(self, dense: Tensor) -> Tensor:
        """``[num_examples, num_columns, dim]`` of ``[num_examples, num_columns]``."""
        return dense.unsqueeze(2) * self.weight


def pooled_width(embedding_bag_collection: Any) -> int:
    """Width of the pooled vectors of a collection: the dimension of every feature, added up."""
    configs = embedding_bag_collection.embedding_bag_configs()
    return sum(config.embedding_dim * len(config.feature_names) for config in configs)


def reset_like_fuxictr(model: nn.Module) -> None:
    """Give all linear layers FuxiCTR's initial values: Glorot's normal weights, biases of zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
