"""Weights some steps ahead, predicted from an optimizer's state: what its rule gives if the gradient stays what it is.

    optimizer          update u of a step                     weights s steps ahead
    SGD, momentum      u = momentum_buffer                    W - lr u (r + r^2 + … + r^s)         r: see `_rest`
    SGD                u = last gradient                      d^s W - lr u (1 + d + … + d^(s-1))   d = 1 - lr decay
    Adam               u = m / (sqrt(v) + eps), corrected     W - lr s u
    AdamW              the same                               d^s W - lr u (1 + d + … + d^(s-1))
    Adagrad            u = last gradient                      s steps with it

This is the prediction of SpecTrain and PipeOptim, ``W - lr s u``, with the decay of the weights that they leave out. It
equals s real steps if the gradient is constant, and with momentum has been for a while. L2 decay of Adam is part of its
moments, and held constant: this is wrong by ``lr decay s^2 / 2`` parts of a step. All steps have the present rate.

A parameter that has made no step is predicted to stay. The weights themselves are never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bagpipe.errors import InputError

__all__ = ["RULES", "Rule", "WeightPredictor"]

Group = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule by which the weights of one optimizer are predicted.

    Attributes:
        predict: (weight, state, parameter group, last gradient, steps) -> predicted weights, a new tensor.
        needs_gradient: whether a parameter group needs the last gradient, which its state does not have.
    """

    predict: Callable[[Tensor, State, Group, Tensor | None, int], Tensor]
    needs_gradient: Callable[[Group], bool]


def _sgd(weight: Tensor, state: State, group: Group, gradient: Tensor | None, steps: int) -> Tensor:
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if not group["momentum"]:
        assert gradient is not None, "asked for by needs_gradient"
        return _decayed(weight, gradient, lr, decay, steps)
    momentum = float(group["momentum"])
    rest = _rest(lr * decay, momentum, float(group["dampening"]), is_nesterov=group["nesterov"])
    # The update of Nesterov's rule is gradient + momentum * buffer; the gradient is buffer - momentum * buffer before.
    share = 1 - momentum / rest + momentum if group["nesterov"] else 1.0
    return weight.sub(state["momentum_buffer"], alpha=lr * share * _geometric(rest, 1, steps))


def _rest(decay: float, momentum: float, dampening: float, *, is_nesterov: bool) -> float:
    """Ratio r of an update to the one before, once the gradient without L2 decay has been constant for long.

    Without decay it is 1. With it the updates pull the weights to a fixed point, and shrink. Both recurrences, of the
    buffer and of the weights, are linear; r is the larger root of their characteristic polynomial.
    """
    if is_nesterov:
        linear, constant = (1 + momentum) * (1 - decay), momentum * (1 - decay)
    else:
        linear, constant = 1 + momentum - decay * (1 - dampening), momentum
    return (linear + math.sqrt(max(0.0, linear * linear - 4 * constant))) / 2


def _adam(weight: Tensor, state: State, group: Group, gradient: Tensor | None, steps: int) -> Tensor:
    step = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    update = state["exp_avg"].div(root).div_(1 - beta1**step)
    decay = float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0
    return _decayed(weight, update, float(group["lr"]), decay, steps)


def _adagrad(weight: Tensor, state: State, group: Group, gradient: Tensor | None, steps: int) -> Tensor:
    assert gradient is not None, "asked for by needs_gradient"
    weight, squares = weight.clone(), state["sum"].clone()
    for number in range(steps):
        lr = float(group["lr"]) / (1 + (float(state["step"]) + number) * group["lr_decay"])
        update = gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
        squares.addcmul_(update, update)
        weight.addcdiv_(update, squares.sqrt().add_(group["eps"]), value=-lr)
    return weight


def _decayed(weight: Tensor, update: Tensor, lr: float, decay: float, steps: int) -> Tensor:
    """Weights after steps ``W = (1 - lr decay) W - lr update``."""
    kept = 1 - lr * decay
    return weight.mul(kept**steps).sub_(update, alpha=lr * _geometric(kept, 0, steps - 1))


def _geometric(ratio: float, first: int, last: int) -> float:
    return math.fsum(ratio**power for power in range(first, last + 1))


#: Optimizer -> its rule.
RULES: Mapping[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(predict=_sgd, needs_gradient=lambda group: not group["momentum"]),
    torch.optim.Adam: Rule(predict=_adam, needs_gradient=lambda group: False),
    torch.optim.AdamW: Rule(predict=_adam, needs_gradient=lambda group: False),
    torch.optim.Adagrad: Rule(predict=_adagrad, needs_gradient=lambda group: True),
}


class WeightPredictor:
    """Predicts the weights of an optimizer's parameters.

    Args:
        optimizer: one of `RULES`.

    Raises:
        InputError: there is no rule for it, or it maximizes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        rule = RULES.get(type(optimizer))
        if rule is None:
            known = ", ".join(kind.__name__ for kind in RULES)
            raise InputError(
                f"the weights of {type(optimizer).__name__} cannot be predicted: expected one of the optimizers {known}"
            )
        if any(group["maximize"] for group in optimizer.param_groups):
            raise InputError("the weights of an optimizer that maximizes cannot be predicted: expected maximize=False")
        self._optimizer = optimizer
        self._rule = rule
        #: Last gradients of the parameters whose rule needs them.
        self.gradients: dict[Parameter, Tensor] = {}

    def stepped(self) -> None:
        """Keep the gradients of the step just made, where the rule needs them."""
        for parameter, group in self._parameters():
            if parameter.grad is None or not self._rule.needs_gradient(group):
                continue
            if parameter in self.gradients:
                self.gradients[parameter].copy_(parameter.grad)
            else:
                self.gradients[parameter] = parameter.grad.detach().clone()

    @torch.no_grad()
    def predict(self, steps: int, out: Mapping[Parameter, Tensor]) -> None:
        """Write the weights `steps` steps ahead.

        Args:
            steps: at least 0; 0: the weights themselves.
            out: a tensor for each parameter.
        """
        for parameter, group in self._parameters():
            target = out[parameter]
            state, gradient = self._optimizer.state.get(parameter), self.gradients.get(parameter)
            is_new = not state if not self._rule.needs_gradient(group) else gradient is None
            if is_new or not steps:
                target.copy_(parameter)
            else:
                target.copy_(self._rule.predict(parameter, state or {}, group, gradient, steps))

    def _parameters(self) -> list[tuple[Parameter, Group]]:
        return [(parameter, group) for group in self._optimizer.param_groups for parameter in group["params"]]
