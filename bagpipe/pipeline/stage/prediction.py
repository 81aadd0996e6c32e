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

Where ranks divide a stage, each has the state of its segments. What a rule follows of it is gathered once per step,
with the new weights, and every rank predicts whole weights. So an update per parameter is whole on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.errors import InputError

__all__ = ["RULES", "Rule", "WeightPredictor"]

Group = Mapping[str, Any]
State = Mapping[str, Any]
_Followed = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule by which the weights of one optimizer are predicted.

    Attributes:
        follows: (state, parameter group) -> tensors that `predict` reads, of the weight's shape, element by element.
        predict: (weight, what it follows, state, parameter group, last gradient, steps) -> predicted weights, a new
            tensor. Of the state it reads numbers.
        needs_gradient: whether a parameter group needs the last gradient, which its state does not have.
    """

    follows: Callable[[State, Group], _Followed]
    predict: Callable[[Tensor, _Followed, State, Group, Tensor | None, int], Tensor]
    needs_gradient: Callable[[Group], bool]


def _sgd(
    weight: Tensor, followed: _Followed, state: State, group: Group, gradient: Tensor | None, steps: int
) -> Tensor:
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if not group["momentum"]:
        assert gradient is not None, "asked for by needs_gradient"
        return _decayed(weight, gradient, lr, decay, steps)
    momentum = float(group["momentum"])
    rest = _rest(lr * decay, momentum, float(group["dampening"]), is_nesterov=group["nesterov"])
    # The update of Nesterov's rule is gradient + momentum * buffer; the gradient is buffer - momentum * buffer before.
    share = 1 - momentum / rest + momentum if group["nesterov"] else 1.0
    (momentum_buffer,) = followed
    return weight.sub(momentum_buffer, alpha=lr * share * _geometric(rest, 1, steps))


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


def _adam_update(state: State, group: Group) -> _Followed:
    step = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    return (state["exp_avg"].div(root).div_(1 - beta1**step),)


def _adam(
    weight: Tensor, followed: _Followed, state: State, group: Group, gradient: Tensor | None, steps: int
) -> Tensor:
    decay = float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0
    (update,) = followed
    return _decayed(weight, update, float(group["lr"]), decay, steps)


def _adagrad(
    weight: Tensor, followed: _Followed, state: State, group: Group, gradient: Tensor | None, steps: int
) -> Tensor:
    assert gradient is not None, "asked for by needs_gradient"
    weight, squares = weight.clone(), followed[0].clone()
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
    torch.optim.SGD: Rule(
        follows=lambda state, group: (state["momentum_buffer"],) if group["momentum"] else (),
        predict=_sgd,
        needs_gradient=lambda group: not group["momentum"],
    ),
    torch.optim.Adam: Rule(follows=_adam_update, predict=_adam, needs_gradient=lambda group: False),
    torch.optim.AdamW: Rule(follows=_adam_update, predict=_adam, needs_gradient=lambda group: False),
    torch.optim.Adagrad: Rule(
        follows=lambda state, group: (state["sum"],), predict=_adagrad, needs_gradient=lambda group: True
    ),
}


class WeightPredictor:
    """Predicts the weights of a model's parameters.

    Args:
        optimizer: one of `RULES`, of the parameters or of segments of them.
        share: has the segments; None: the parameters are not divided.

    Attributes:
        gradients: last gradients of the parameters whose rule needs them; whole.

    Raises:
        InputError: there is no rule for it, or it maximizes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, share: StageShare | None = None) -> None:
        rule = RULES.get(type(optimizer))
        if rule is None:
            known = ", ".join(kind.__name__ for kind in RULES)
            raise InputError(
                f"the weights of {type(optimizer).__name__} cannot be predicted: expected one of the optimizers {known}"
            )
        if any(group["maximize"] for group in optimizer.param_groups):
            raise InputError("the weights of an optimizer that maximizes cannot be predicted: expected maximize=False")
        self.gradients: dict[Parameter, Tensor] = {}
        self._optimizer = optimizer
        self._rule = rule
        self._share = share
        self._wholes: Mapping[Parameter, Parameter] = {} if share is None else share.wholes
        self._own_gradients: dict[Parameter, Tensor] = {} if share is not None else self.gradients
        self._followed: dict[Parameter, _Followed] = {}  # of divided parameters, since the latest `gather`

    def stepped(self) -> None:
        """Keep the gradients of the step just made, where the rule needs them."""
        for parameter, group in self._parameters():
            if parameter.grad is not None and self._rule.needs_gradient(group):
                _keep(self._own_gradients, parameter, parameter.grad.detach())

    def gather(self) -> None:
        """Read what predictions follow from all holders, if the parameters are divided.

        All holders call it, after a step and before the first prediction.

        Raises:
            PeerError: a peer is gone or silent.
        """
        share = self._share
        if share is None:
            return
        names = {segment: name for name, segment in share.segments.items()}
        parameters = {name: self._wholes[segment] for segment, name in names.items()}
        found = {
            names[parameter]: self._rule.follows(state, group)
            for parameter, group in self._parameters()
            if (state := self._optimizer.state.get(parameter))
        }
        wholes: dict[str, list[Tensor]] = {name: [] for name in found}
        for position in range(max(map(len, found.values()), default=0)):
            parts = {name: tensors[position] for name, tensors in found.items() if position < len(tensors)}
            for name, whole in share.joined(parts).items():
                wholes[name].append(whole)
        # Copied: lanes with streams of their own read them, and memory is not handed from one to the other.
        for name, tensors in wholes.items():
            kept = self._followed.setdefault(parameters[name], tuple(tensors))
            for before, now in zip(kept, tensors, strict=True):
                if before is not now:
                    before.copy_(now)
        gradients = share.joined({names[segment]: own for segment, own in self._own_gradients.items()})
        for name, gradient in gradients.items():
            _keep(self.gradients, parameters[name], gradient)

    @torch.no_grad()
    def predict(self, steps: int, out: Mapping[Parameter, Tensor]) -> None:
        """Write the weights `steps` steps ahead.

        Args:
            steps: at least 0; 0: the weights themselves.
            out: a tensor for each parameter; whole.
        """
        for stepped, group in self._parameters():
            parameter = self._wholes.get(stepped, stepped)
            target, gradient = out[parameter], self.gradients.get(parameter)
            state = self._optimizer.state.get(stepped) or {}
            is_new = not state if not self._rule.needs_gradient(group) else gradient is None
            if is_new or not steps:
                target.copy_(parameter)
                continue
            followed = self._rule.follows(state, group) if self._share is None else self._followed.get(parameter, ())
            target.copy_(self._rule.predict(parameter, followed, state, group, gradient, steps))

    def _parameters(self) -> list[tuple[Parameter, Group]]:
        """What the optimizer steps, and its settings."""
        return [(parameter, group) for group in self._optimizer.param_groups for parameter in group["params"]]


def _keep(kept: dict[Parameter, Tensor], parameter: Parameter, gradient: Tensor) -> None:
    if parameter in kept:
        kept[parameter].copy_(gradient)
    else:
        kept[parameter] = gradient.clone()
