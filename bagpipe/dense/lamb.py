"""`Lamb`: Adam's step, scaled layer by layer (You et al., "Large Batch Optimization for Deep Learning").

    m = beta1 * m + (1 - beta1) * g          r = (m / (1 - beta1 ** t)) / (sqrt(v / (1 - beta2 ** t)) + eps)
    v = beta2 * v + (1 - beta2) * g * g      u = r + weight_decay * w
    w = w - lr * |w| / |u| * u               arXiv:1904.00962, algorithm 2, phi(z) = z; a layer is a parameter

The ratio of the norms is 1 where one of them is 0, as in the authors' own code. Weight decay is decoupled. Nothing
waits for the device.

Of a layer that ranks divide, each rank has the squares of its share: `Lamb.add_up` adds them, all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Lamb"]


class Lamb(torch.optim.Optimizer):
    """See above. State of a parameter: ``step`` (float32, on the host), ``exp_avg``, ``exp_avg_sq``.

    Args:
        parameters: dense parameters, or groups of them.
        lr: learning rate.
        betas: decay of m and of v.
        eps: added to the root.
        weight_decay: share of the weight in the update.

    Attributes:
        add_up: adds vectors (float64) over the ranks that have shares of the parameters, in one order on all of them;
            None: the parameters are whole.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.add_up: Callable[[Tensor], Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.add_up is None:
            for weight, gradient, group in own:
                update = self._update(weight, gradient, group)
                _apply(weight, update, torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update), group)
        elif own:
            updates = [self._update(weight, gradient, group) for weight, gradient, group in own]
            squares = [
                _squares(tensor)
                for (weight, _, _), update in zip(own, updates, strict=True)
                for tensor in (weight, update)
            ]
            norms = self.add_up(torch.stack(squares)).sqrt_()
            for position, ((weight, _, group), update) in enumerate(zip(own, updates, strict=True)):
                _apply(weight, update, norms[2 * position], norms[2 * position + 1], group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        number = state["step"].item()
        m = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (v / (1 - beta2**number)).sqrt_().add_(group["eps"])
        update: Tensor = (m / (1 - beta1**number)).div_(root)
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
        return update


def _squares(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square_()


def _apply(weight: Tensor, update: Tensor, of_weight: Tensor, of_update: Tensor, group: dict[str, Any]) -> None:
    is_zero = (of_weight == 0) | (of_update == 0)
    ratio = torch.where(is_zero, torch.ones_like(of_weight), of_weight / of_update)
    weight.sub_(update.mul_(ratio * group["lr"]))
