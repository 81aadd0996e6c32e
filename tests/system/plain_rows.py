"""`PlainRows`: row optimizers of whole tables, as plain formulas. It decays every row of a table at every step.

With L2 decay every row has the gradient ``decay * w``, plus its own, and gets the whole update. With decoupled decay
every row is multiplied by ``1 - lr * decay``; then the rows of the batch are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["STATES", "PlainRows"]

BETA1, BETA2 = 0.9, 0.999

#: Row optimizer -> names of its state, in the order of a stored record.
STATES: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "ftrl": ("z", "sum"),
}


class PlainRows(torch.optim.Optimizer):
    """One row optimizer of some tables.

    Args:
        tables: parameters ``[rows, dim]`` with sparse gradients.
        name: of the optimizer.
        lr: learning rate, the first group's; schedulers can change it.
        eps, momentum, beta, l1, l2: numbers of the optimizers.
        decay: of the rows.
        decoupled: kind of the decay.
    """

    def __init__(
        self,
        tables: Iterable[nn.Parameter],
        *,
        name: str,
        lr: float,
        eps: float = 0.0,
        momentum: float = 0.9,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        super().__init__(list(tables), {"lr": lr})
        self.name, self.eps, self.momentum, self.beta, self.l1, self.l2 = name, eps, momentum, beta, l1, l2
        self.decay, self.decoupled, self.number = decay, decoupled, 0
        for table in self.param_groups[0]["params"]:
            for state in STATES[name]:
                width = 1 if name == "rowwise_adagrad" else table.shape[1]
                self.state[table][state] = torch.zeros(len(table), width, dtype=table.dtype)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.number += 1
        lr = self.param_groups[0]["lr"]
        for table in self.param_groups[0]["params"]:
            used = torch.zeros(len(table), dtype=torch.bool)
            gradient = torch.zeros_like(table)
            if table.grad is not None:
                used[table.grad.coalesce().indices()[0]] = True
                gradient = table.grad.to_dense()
            if self.decoupled:
                table.mul_(1 - lr * self.decay)
            elif self.decay:
                gradient = gradient + self.decay * table
                used[:] = True
            state = {name: value[used] for name, value in self.state[table].items()}
            table[used] = _RULES[self.name](self, table[used], gradient[used], state, lr)
            for name, value in state.items():
                self.state[table][name][used] = value


Rule = Callable[[PlainRows, Tensor, Tensor, dict[str, Tensor], float], Tensor]


def _sgd(numbers: PlainRows, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    return w - lr * g


def _momentum(numbers: PlainRows, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    state["momentum_buffer"] = numbers.momentum * state["momentum_buffer"] + g
    return w - lr * state["momentum_buffer"]


def _adagrad(numbers: PlainRows, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    state["sum"] = state["sum"] + g**2
    return w - lr * g / (state["sum"] ** 0.5 + numbers.eps)


def _rowwise_adagrad(numbers: PlainRows, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    state["sum"] = state["sum"] + (g**2).mean(dim=1, keepdim=True)
    return w - lr * g / (state["sum"] ** 0.5 + numbers.eps)


def _adam(numbers: PlainRows, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    m = state["exp_avg"] = BETA1 * state["exp_avg"] + (1 - BETA1) * g
    v = state["exp_avg_sq"] = BETA2 * state["exp_avg_sq"] + (1 - BETA2) * g**2
    rate = lr * (1 - BETA2**numbers.number) ** 0.5 / (1 - BETA1**numbers.number)
    moved: Tensor = w - rate * m / (v**0.5 + numbers.eps)
    return moved


def _ftrl(numbers: PlainRows, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> Tensor:
    n = state["sum"]
    state["sum"] = n + g**2
    z = state["z"] = state["z"] + g - (state["sum"] ** 0.5 - n**0.5) / lr * w
    strength = (numbers.beta + state["sum"] ** 0.5) / lr + numbers.l2
    moved: Tensor = -(z - z.sign() * numbers.l1) / strength
    return torch.where(z.abs() <= numbers.l1, torch.zeros_like(z), moved)


_RULES: Mapping[str, Rule] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
}
