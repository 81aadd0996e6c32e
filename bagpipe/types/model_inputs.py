"""`ModelInputs`: the tensors of one batch that a model is called with; `device_of`: where a model expects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.nn import Module

__all__ = ["ModelInputs", "device_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """Arguments of ``model(dense, sparse)``, which returns logits, and the labels of the loss; all on the device.

    Attributes:
        dense: ``[num_examples, num_dense]`` in the run's dtype.
        sparse: the batch's ids as the model's embedding modules take them (a KeyedJaggedTensor).
        labels: ``[num_examples]`` in the run's dtype; with several labels or weights of examples ``[num_examples,
            columns]`` (`Batch.targets`).
    """

    dense: Tensor
    sparse: Any
    labels: Tensor


def device_of(model: Module) -> device:
    """The device of a model's parameters; the CPU for a model without parameters."""
    import torch

    return next(model.parameters(), torch.empty(0)).device
