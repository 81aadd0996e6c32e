"""`whole_kfac`: K-FAC of a model that every rank has: layers, this rank's share of them, room for factors.

model ──linear_layers──> layers ──owners──> those of this rank ──check_factor_memory──> Kfac
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bagpipe.cache.auto_rows import free_on_cuda
from bagpipe.dense.precondition.exchange import KfacExchange
from bagpipe.dense.precondition.kfac import Kfac, KfacSettings
from bagpipe.dense.precondition.layers import LinearLayer, factor_bytes, linear_layers, owners
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
    places = owners(len(layers), range(1 if group is None else group.world_size))
    owned = [number for number, place in enumerate(places) if group is None or place == group.rank]
    is_summed = group is not None and settings.factors == "summed"
    check_factor_memory([layers[number] for number in owned], device, layers if is_summed else (), lag=settings.lag)
    exchange = None if group is None else KfacExchange(group, layers, places)
    return Kfac(layers, settings, owned=owned, exchange=exchange)


def check_any_layers(layers: Sequence[LinearLayer]) -> None:
    """Raise InputError if there are no layers."""
    if not layers:
        raise InputError("K-FAC needs a model with trainable torch.nn.Linear layers, got none")


def check_factor_memory(
    owned: Sequence[LinearLayer], device: torch.device, summed: Sequence[LinearLayer] = (), *, lag: int = 0
) -> None:
    """Raise InputError if what a rank keeps of K-FAC does not fit in the memory of its device; see `factor_bytes`."""
    needed = factor_bytes(owned, summed, lag=lag)
    free = free_on_cuda(device) if device.type == "cuda" else free_memory_bytes()
    if free is not None and needed > free:
        largest = max((*owned, *summed), key=lambda layer: factor_bytes([layer]))
        raise InputError(
            f"K-FAC: factors, inverses and sums of {len(owned)} layers need {needed:,} bytes on "
            f"{device}, {free:,} are free; the largest layer is {largest.name} with {factor_bytes([largest]):,}"
        )
