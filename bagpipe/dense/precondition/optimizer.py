"""`KfacOptimizer`: an optimizer of a plain PyTorch loop whose gradients K-FAC preconditions.

    optimizer = KfacOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss(model(inputs), labels).backward(); optimizer.step(); optimizer.zero_grad()

The forwards and backwards between two steps are one batch, whose loss is the mean over its examples: of several
micro-batches each loss is divided by their number. Linear layers are preconditioned, other parameters are stepped with
their plain gradient. With a group of ranks that hold the same model (DistributedDataParallel), which sums or averages
gradients before the step, every layer belongs to one rank, as in DP-KFAC (arXiv:2206.15143).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bagpipe.dense.precondition.exchange import KfacExchange
from bagpipe.dense.precondition.kfac import Kfac, KfacSettings, step_limit
from bagpipe.dense.precondition.layers import linear_layers, owners
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["KfacOptimizer"]


class KfacOptimizer(Optimizer):
    """See above. `param_groups`, `state` and `defaults` are those of the optimizer that steps.
    `bagpipe.TrainPipeline` takes it too, on any number of ranks, and keeps the factors in its checkpoints.

    Args:
        model: its linear layers are preconditioned, in training mode.
        optimizer: of the model's parameters; steps with the preconditioned gradients.
        settings: numbers of K-FAC; their lag must be 0. Factors are summed over the ranks, or local (DP-KFAC).
        group: ranks that hold the model, such as `bagpipe.distributed.plain_group.PlainGroup`; None: this process
            alone.

    Attributes:
        optimizer: as given.
        settings: as given.

    Raises:
        InputError: the model has no trainable linear layer, or a convolution, or the lag is not 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        settings: KfacSettings | None = None,
        group: RankGroup | None = None,
    ) -> None:
        # Not that of the base: its groups, state and hooks are the other optimizer's.
        found = KfacSettings() if settings is None else settings
        layers = linear_layers(model)
        if not layers:
            raise InputError("K-FAC needs a model with a trainable torch.nn.Linear, got none")
        if found.lag:
            raise InputError(
                f"K-FAC in a plain loop has no step to hide an inversion in: expected lag 0, got {found.lag}"
            )
        ranks = range(1 if group is None else group.world_size)
        places = owners(len(layers), ranks)
        self.optimizer = optimizer
        self.settings = found
        self._model = model
        self._kfac = Kfac(
            layers,
            found,
            owned=[n for n, place in enumerate(places) if group is None or place == group.rank],
            exchange=None if group is None else KfacExchange(group, layers, places),
        )
        self._capture = self._kfac.capture(layers)
        self._num_steps = 0
        self._num_forwards = 0
        self._model_forward = model.forward
        model.forward = self._forward

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Precondition the gradients, and step.

        Raises:
            InputError: a factor is singular.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch, kfac = self._num_steps, self._kfac
        num_examples = self._capture.num_examples()
        for unit in range(self._num_forwards):
            self._capture.add_inputs(unit, batch)
            self._capture.add_outputs(unit, batch, num_examples)
        kfac.add_up(batch)
        for layer in kfac.owned:
            kfac.invert(batch, layer)
        kfac.precondition()
        kfac.share()
        kfac.limit(step_limit(kfac.sizes, kappa=self.settings.kappa, lr=float(self.param_groups[0]["lr"])))
        self.optimizer.step()
        self._num_steps, self._num_forwards = batch + 1, 0
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, and ``kfac``: of the layers that this rank owns."""
        kfac = {"num_steps": torch.tensor(self._num_steps), **self._kfac.tensors(self._num_steps)}
        return {**self.optimizer.state_dict(), "kfac": kfac}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back a state; of K-FAC that of own layers, wherever it was made.

        Raises:
            InputError: a layer is missing, or has another shape.
        """
        tensors: Mapping[str, Tensor] = state_dict["kfac"]
        self._kfac.load(tensors)
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "kfac"})
        self._num_steps = int(tensors["num_steps"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """A hook of the optimizer that steps: it sees the preconditioned gradients."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """A hook of the optimizer that steps."""
        return self.optimizer.register_step_post_hook(hook)

    def release(self) -> Optimizer:
        """Leave the model alone, and return the optimizer that steps: a training loop takes over K-FAC."""
        self._capture.close()
        self._model.forward = self._model_forward
        return self.optimizer

    def __repr__(self) -> str:
        return f"KfacOptimizer({self.settings}, {self.optimizer!r})"

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or not self.settings.makes_factors(self._num_steps):
            return self._model_forward(*arguments, **named)
        self._num_forwards += 1
        return self._capture.during(self._num_forwards - 1, lambda: self._model_forward(*arguments, **named))
