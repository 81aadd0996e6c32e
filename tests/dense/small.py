"""A library model in float32 with rows in ordinary parameters, and its batches, for tests of executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.executor import DenseExecutor
from bagpipe.dense.precision import Precision
from bagpipe.split.split import split_parts, trace_parts
from bagpipe.split.staged_model import StagedModel
from bagpipe.types.model_inputs import ModelInputs
from tests.split.whole_models import NUM_DENSE, library_model, random_batch

__all__ = ["BFLOAT16", "SIZES", "inputs_of", "model_of", "train", "whole"]

BFLOAT16 = Precision(autocast_dtype=torch.bfloat16)

#: Full batches of 12, and a smaller last one.
SIZES = (12, 12, 12, 5)


def model_of(name: str) -> nn.Module:
    return library_model(name).float()


def inputs_of(num_examples: int, seed: int = 0) -> ModelInputs:
    dense, sparse = random_batch(num_examples, seed)
    labels = torch.randint(0, 2, (num_examples,), generator=torch.Generator().manual_seed(seed))
    return ModelInputs(dense=dense.float(), sparse=sparse, labels=labels.float())


def whole(model: nn.Module, precision: Precision | None = None) -> StagedModel:
    """The model as an embedding stage and one stage."""
    with (precision or Precision()).autocast():
        parts = trace_parts(model, num_dense=NUM_DENSE, dtype=torch.float32)
    return split_parts(parts, stages=1)


def train(
    model: nn.Module, work: DenseExecutor, sizes: Sequence[int] = SIZES, *, first_seed: int = 0
) -> tuple[list[float], Mapping[str, Tensor]]:
    """Train with plain gradient steps. Returns the losses and the final state."""
    losses, loss_scale = [], work.precision.loss_scale
    for seed, size in enumerate(sizes, start=first_seed):
        under_way: Any = work.forward(inputs_of(size, seed), size, loss_scale)
        under_way.backward()
        losses.append(float(under_way.loss_sum))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 / loss_scale.value * parameter.grad
                    parameter.grad = None
    return losses, {name: value.clone() for name, value in model.state_dict().items()}
