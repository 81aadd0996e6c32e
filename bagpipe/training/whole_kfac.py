"""`whole_kfac`: K-FAC of a model that every rank has: layers, this rank's share of them, room for factors.

model ──linear_layers──> layers ──owners──> Kfac, with those of this rank ──check_factor_memory──> it fits
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bagpipe.cache.auto_rows import free_on_cuda
from bagpipe.dense.precondition.kfac import Kfac, KfacSettings
from bagpipe.dense.precondition.layers import LinearLayer, factor_bytes, linear_layers
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError
from bagpipe.util.host_memory import free_memory_bytes

__all__ = ["check_any_layers", "check_factor_memory", "whole_kfac"]


def whole_kfac(model: nn.Module, settings: KfacSettings, device: torch.device, group: RankGroup | None = None) -> Kfac:
    """K-FAC of a model that every rank has.

    Args:
        model: with converted embedding collections.
        settings: numbers.
        device: of the model.
        group: all ranks; None: there is one.

    Raises:
        InputError: the model has no linear layers, or others that are not supported, or its factors do not fit.
    """
    layers = linear_layers(model)
    check_any_layers(layers)
    kfac = Kfac.of_group(layers, settings, group)
    check_factor_memory([kfac], device)
    return kfac


def check_any_layers(layers: Sequence[LinearLayer]) -> None:
    """Raise InputError if there are no layers."""
    if not layers:
        raise InputError("K-FAC needs a model with trainable torch.nn.Linear layers, got none")


def check_factor_memory(kfacs: Sequence[Kfac], device: torch.device) -> None:
    """Raise InputError if what a rank keeps of K-FAC does not fit in the memory of its device.

    Args:
        kfacs: of the stages of the rank, or of the whole model; nothing of them is allocated yet.
        device: of the model.
    """
    needed = sum(kfac.kept_bytes for kfac in kfacs)
    free = free_on_cuda(device) if device.type == "cuda" else free_memory_bytes()
    if free is not None and needed > free:
        layers = [layer for kfac in kfacs for layer in kfac.captured_layers]
        largest = max(layers, key=lambda layer: factor_bytes([layer]))
        raise InputError(
            f"K-FAC: factors, inverses and sums of {sum(len(kfac.owned) for kfac in kfacs)} layers need "
            f"{needed:,} bytes on {device}, {free:,} are free; the largest layer is {largest.name} with "
            f"{factor_bytes([largest]):,}"
        )
