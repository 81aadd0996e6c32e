"""`SerialKfac`: K-FAC of all stages in one thread, for the reference of `run.verify`.

    parts of a batch ──their captures──> sums of each owner ──invert──> inverses ──> gradients, limited by kappa

Summed factors are those of all examples. Local ones are those of the examples of the rank that owns the layer: each
rank that holds a stage has a `Kfac` of the layers that it owns there, and captures its own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.kfac import Kfac, KfacSettings, step_limit
from bagpipe.dense.precondition.layers import LinearLayer, linear_layers, owners

__all__ = ["SerialKfac"]


class SerialKfac:
    """See the module.

    Args:
        modules: by stage.
        names: id of a parameter of the modules -> its name in the whole model.
        holders: stage -> the ranks that hold it, in the order in which they own layers.
        settings: numbers.

    Raises:
        InputError: as `linear_layers`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Mapping[int, str],
        holders: Callable[[int], tuple[int, ...]],
        settings: KfacSettings,
    ) -> None:
        self._settings = settings
        self._kfacs: list[Kfac] = []
        self._captures: dict[tuple[int, int], LayerCapture] = {}
        for stage, module in enumerate(modules):
            layers, ranks = linear_layers(module, names), holders(stage)
            owned: dict[int | None, tuple[LinearLayer, ...]] = {None: layers}
            if settings.factors == "local":
                pairs = [*zip(layers, owners(len(layers), ranks), strict=True)]
                owned = {rank: tuple(layer for layer, owner in pairs if owner == rank) for rank in ranks}
            for owner, own in owned.items():
                if own:
                    self._kfacs.append(Kfac(own, settings))
                    capture = self._kfacs[-1].capture(own)
                    self._captures |= {(stage, rank): capture for rank in (ranks if owner is None else (owner,))}

    def capture(self, stage: int, rank: int, batch: int) -> LayerCapture | None:
        """What captures a part that a rank computes of a stage; None: the part enters no factor."""
        return self._captures.get((stage, rank)) if self._settings.makes_factors(batch) else None

    def apply(
        self,
        batch: int,
        parts: Sequence[tuple[LayerCapture, int, int]],
        *,
        factor: float,
        lr: float,
        is_left_out: bool,
    ) -> None:
        """Fold a batch into the factors, and precondition the gradients of the modules' parameters.

        Args:
            batch: its number.
            parts: capture, number and examples of each part that was captured.
            factor: from gradients of outputs to those of an example's loss: see `BatchSums.add_outputs`.
            lr: learning rate.
            is_left_out: the batch changes no factor, and no gradient is needed.

        Raises:
            InputError: a factor is singular.
        """
        for capture, number, num_examples in parts:
            capture.add_inputs(number, batch)
            capture.add_outputs(number, batch, factor=factor, num_examples=num_examples)
        for kfac in self._kfacs:
            if is_left_out:
                kfac.drop(batch)
            else:
                kfac.add_up(batch)
            for layer in kfac.owned:
                kfac.invert(batch, layer)
            kfac.precondition()
        if is_left_out or not self._kfacs:
            return
        sizes = torch.cat([kfac.sizes for kfac in self._kfacs])
        limit = step_limit(sizes, kappa=self._settings.kappa, lr=lr)
        for kfac in self._kfacs:
            kfac.limit(limit)
