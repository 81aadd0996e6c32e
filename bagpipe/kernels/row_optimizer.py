"""Row optimizers. Each batch updates each of its rows once, in place, with the row's summed gradient.

A row record is ``[weights | state]``. Definitions are torch's (`torch.optim.SGD`, `Adagrad` and `SparseAdam` on
sparse gradients), torchrec's (`RowWiseAdagrad`) and that of McMahan et al., "Ad Click Prediction: a View from the
Trenches", KDD 2013, algorithm 1 (FTRL-Proximal), with `eps` always explicit.

Rule of this file: *every operation is one correctly rounded elementwise step* (add, subtract, multiply, divide, square
root). Fused forms (``add_(x, alpha=…)``, ``addcmul_``, ``addcdiv_``) are avoided: the vector body of a CPU kernel can
contract ``a * b + c`` into one rounding where its scalar tail does not, so results would depend on the position of a
row in the block. Without them, a result depends on the row alone, and rows can be updated in any grouping: in blocks
that fit the CPU's cache, or with the rows of the next batch first. One exception: torch's float32 square root on a CPU
is MKL's, off by one bit for some numbers, independently of their position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_decay import decay_factor, row_steps, set_row_steps
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH

__all__ = ["ADAM_BETAS", "ROW_OPTIMIZERS", "RowOptimizer", "adam_rate", "decay_rows"]

#: torch's defaults for Adam and SparseAdam.
ADAM_BETAS = (0.9, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer:
    """One row optimizer.

    Attributes:
        name: key of `OPTIMIZER_STATE_WIDTH`.
        state_width: elements of optimizer state for a dimension.
        apply: ``apply(rows, grad, step)`` updates `rows` ``[n, dim + state_width(dim)]`` in place and uses `grad`
            ``[n, dim]`` as scratch.
    """

    name: str
    state_width: Callable[[int], int]
    apply: Callable[[Tensor, Tensor, RowStep], None]


def _sgd(rows: Tensor, grad: Tensor, step: RowStep) -> None:
    rows[:, : grad.shape[1]].sub_(grad.mul_(step.lr))


def _momentum(rows: Tensor, grad: Tensor, step: RowStep) -> None:
    dim = grad.shape[1]
    velocity = rows[:, dim:]
    velocity.mul_(step.momentum).add_(grad)
    rows[:, :dim].sub_(torch.mul(velocity, step.lr, out=grad))


def _adagrad(rows: Tensor, grad: Tensor, step: RowStep) -> None:
    dim = grad.shape[1]
    square_sum = rows[:, dim:]
    std = grad * grad
    square_sum.add_(std)
    torch.sqrt(square_sum, out=std)
    std.add_(step.eps)
    rows[:, :dim].sub_(grad.div_(std).mul_(step.lr))


def _rowwise_adagrad(rows: Tensor, grad: Tensor, step: RowStep) -> None:
    dim = grad.shape[1]
    square_sum = rows[:, dim:]
    # A tensor: CUDA replaces division by a Python number with multiplication by its reciprocal, which rounds twice.
    square_sum.add_(_row_sums_(grad * grad).div_(square_sum.new_full((), dim)))
    rows[:, :dim].sub_(grad.div_(square_sum.sqrt().add_(step.eps)).mul_(step.lr))


def _adam(rows: Tensor, grad: Tensor, step: RowStep) -> None:
    dim = grad.shape[1]
    beta1, beta2 = ADAM_BETAS
    weights, first, second = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim :]
    square = grad * grad
    first.add_(grad.sub_(first).mul_(1 - beta1))
    second.add_(square.sub_(second).mul_(1 - beta2))
    torch.sqrt(second, out=square)
    square.add_(step.eps)
    torch.div(first, square, out=grad)
    weights.sub_(grad.mul_(adam_rate(step.lr, step.step)))


def _ftrl(rows: Tensor, grad: Tensor, step: RowStep) -> None:
    dim = grad.shape[1]
    weights, z, square_sum = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim :]
    # Tensors: CUDA replaces division by a Python number with multiplication by its reciprocal, which rounds twice.
    alpha = square_sum.new_full((), step.lr)
    before = square_sum.sqrt()
    square_sum.add_(grad * grad)
    root = square_sum.sqrt()
    z.add_(grad.sub_(torch.sub(root, before, out=before).div_(alpha).mul_(weights)))
    shrunk = torch.abs(z, out=grad).sub_(step.l1)
    divisor = root.add_(step.beta).div_(alpha).add_(step.l2)
    # Not 0 where it is used: z differs from 0 only after a gradient.
    moved = torch.div(shrunk, divisor, out=before).copysign_(z).neg_()
    weights.copy_(torch.where(shrunk > 0, moved, torch.zeros_like(moved)))


def decay_rows(rows: Tensor, dim: int, step: RowStep) -> None:
    """Decay rows that are about to be updated, in place: the steps they missed, then this one if it is decoupled.

    Args:
        rows: ``[n, dim + state]``, contiguous. The last number of state is the step they are at.
        dim: weights per row.
        step: of the update.
    """
    if step.missed is None:
        raise JobError("expected the decay that the rows have missed, got none")
    weights, last = rows[:, :dim], rows.shape[1] - 1
    step.missed.apply(rows, dim, row_steps(rows, last).long())
    if not step.is_l2:
        weights.mul_(decay_factor(step.lr, step.weight_decay))
    set_row_steps(rows, last, step.missed.until + 1)


def adam_rate(lr: float, step: int) -> float:
    """Learning rate with Adam's bias correction, in Python's double arithmetic: the same on every device."""
    beta1, beta2 = ADAM_BETAS
    return lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)


def _row_sums_(x: Tensor) -> Tensor:
    """Row sums ``[n, 1]`` of non-negative `x` ``[n, dim]``, in one fixed order on every device. Overwrites `x`.

    A tree reduction: the width, padded with zeros to a power of two, is halved repeatedly by adding the second half to
    the first. Triton tiles, whose width is a power of two, do the same.
    """
    width = x.shape[1]
    while width > 1:
        half = 1 << ((width - 1).bit_length() - 1)
        x[:, : width - half].add_(x[:, half:width])  # the rest would add padding zeros
        width = half
    return x[:, :1]


_APPLY: Mapping[str, Callable[[Tensor, Tensor, RowStep], None]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
}

#: Row optimizers by name.
ROW_OPTIMIZERS: Mapping[str, RowOptimizer] = {
    name: RowOptimizer(name=name, state_width=OPTIMIZER_STATE_WIDTH[name], apply=apply)
    for name, apply in _APPLY.items()
}
