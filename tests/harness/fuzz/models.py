"""A model for ``model.factory`` whose loss is not finite for some examples, chosen by their values alone."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import ModelConfig
from bagpipe.models.torchrec_models import build_model
from bagpipe.types.schema import DataSchema

__all__ = ["infinite", "poisoned"]

#: About one standard normal number in fifty is above.
_THRESHOLD = 2.05


class Poisoned(nn.Module):
    """A model by name whose logits are bad where the first dense column is large."""

    def __init__(self, model: nn.Module, bad: float) -> None:
        super().__init__()
        self.model = model
        self.bad = bad

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor | tuple[Tensor, ...]:
        """Logits ``[num_examples]``; a tuple of a model with a head for each label."""
        heads = self.model(dense, sparse)
        return (
            tuple(map(partial(self._poison, dense), heads)) if isinstance(heads, tuple) else self._poison(dense, heads)
        )

    def _poison(self, dense: Tensor, logits: Tensor) -> Tensor:
        logits = logits.reshape(-1)
        return torch.where(dense[:, 0] > _THRESHOLD, logits.detach() * self.bad, logits)


def poisoned(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """NaN logits."""
    return Poisoned(build_model(schema, dataclasses.replace(config, factory="")), float("nan"))


def infinite(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """Infinite logits, whose loss is infinite or zero, depending on label and sign."""
    return Poisoned(build_model(schema, dataclasses.replace(config, factory="")), float("inf"))
