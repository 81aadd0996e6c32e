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
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.kfac import Kfac, KfacSettings, step_limit
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["KfacOptimizer"]


class KfacOptimizer(Optimizer):
    """See above. `param_groups`, `state`, `defaults` and hooks are those of the optimizer that steps.
    `bagpipe.TrainPipeline` takes it too, on any number of ranks, and keeps the factors in its checkpoints.

    Args:
        model: its linear layers are preconditioned. Forwards in training mode with gradients are captured; copies of
            the model are not.
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
        self.optimizer = optimizer
        self.settings = found
        self._kfac = Kfac.of_group(layers, found, group)
        self._forwards = _Forwards(model, self._kfac.capture(layers, adds=True), found)

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
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        num_examples: int | None = None,
        loss_scale: float = 1.0,
    ) -> Any:
        """Precondition the gradients, and step.

        Args:
            closure: computes gradients and returns the loss, as in torch.
            num_examples: of the batch, on this rank. None: the fewest rows that a layer had in each forward, which are
                the examples unless all layers work on folded places.
            loss_scale: that the losses were multiplied with before their backwards; their gradients are unscaled.

        Raises:
            InputError: a factor is singular.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch, kfac = self._forwards.step, self._kfac
        self._forwards.add_up(batch, num_examples, loss_scale)
        kfac.add_up(batch)
        for layer in kfac.owned:
            kfac.invert(batch, layer)
        kfac.precondition()
        kfac.share()
        kfac.limit(step_limit(kfac.sizes, kappa=self.settings.kappa, lr=float(self.param_groups[0]["lr"])))
        self.optimizer.step()
        self._forwards.step = batch + 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, and ``kfac``: of the layers that this rank owns."""
        num_steps = self._forwards.step
        kfac = {"num_steps": torch.tensor(num_steps), **self._kfac.tensors(num_steps)}
        return {**self.optimizer.state_dict(), "kfac": kfac}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back a state; of K-FAC that of own layers, wherever it was made.

        Raises:
            InputError: a layer is missing, or has another shape.
        """
        tensors: Mapping[str, Tensor] = state_dict["kfac"]
        self._kfac.load(tensors)
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "kfac"})
        self._forwards.step = int(tensors["num_steps"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """A hook of the optimizer that steps: it sees the preconditioned gradients."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """A hook of the optimizer that steps."""
        return self.optimizer.register_step_post_hook(hook)

    def release(self) -> Optimizer:
        """Leave the model alone, and return the optimizer that steps: a training loop takes over K-FAC.

        Raises:
            InputError: it has stepped, or a state was loaded.
        """
        if self._forwards.step:
            raise InputError(
                f"a KfacOptimizer that a pipeline takes over must be new, got one after {self._forwards.step} steps: "
                "a pipeline resumes from its own checkpoints"
            )
        self._forwards.close()
        return self.optimizer

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a KfacOptimizer watches one model: make another one, and load its state_dict")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a KfacOptimizer watches one model: save its state_dict")

    def __repr__(self) -> str:
        return f"KfacOptimizer({self.settings}, {self.optimizer!r})"


class _Forwards:
    """The forwards of one step of a plain loop.

    Args:
        model: watched from now on.
        capture: of its layers.
        settings: which steps make factors.

    Attributes:
        step: number of the step.
    """

    def __init__(self, model: nn.Module, capture: LayerCapture, settings: KfacSettings) -> None:
        self.step = 0
        self._model = model
        self._capture = capture
        self._settings = settings
        self._num_forwards = 0
        self._handles = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def __deepcopy__(self, memo: object) -> Self:
        return self  # hooks of a copied model come here, and are told apart

    def add_up(self, batch: int, num_examples: int | None, loss_scale: float) -> None:
        """Add the forwards of a batch to its sums."""
        found = self._capture.num_examples()
        total = sum(found.values()) if num_examples is None else num_examples
        for number, (index, count) in enumerate(found.items()):
            own = count if num_examples is None else num_examples * (number == 0)
            self._capture.add_inputs(index, batch)
            self._capture.add_outputs(index, batch, factor=total / loss_scale, num_examples=own)
        self._num_forwards = 0

    def close(self) -> None:
        """Stop watching."""
        self._capture.close()
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, arguments: object) -> None:
        wants = module is self._model and module.training and torch.is_grad_enabled()
        if wants and self._settings.makes_factors(self.step):
            self._capture.begin(self._num_forwards)
            self._num_forwards += 1

    def _end(self, module: nn.Module, arguments: object, output: object) -> None:
        if module is self._model:
            self._capture.end()
