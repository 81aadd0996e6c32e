"""`Clip`: limits of gradients, between the backward and the optimizers' steps. Nothing waits for the device.

norm     all gradients times min(1, norm / (|all gradients| + 1e-6))      torch.nn.utils.clip_grad_norm_
value    each element to [-value, value]                                  torch.nn.utils.clip_grad_value_

The norm is that of the gradients in a scope: of dense parameters, of rows, or of all together. Rows are limited where
they are updated; here their factor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["NO_CLIP", "Clip", "Limited", "Prepare", "Scope", "listed"]

#: Of `torch.nn.utils.clip_grad_norm_`.
_EPS = 1e-6

Scope = Literal["dense", "rows", "all"]

#: Changes the gradients of some parameters in place, before they are limited and stepped with.
Prepare: TypeAlias = Callable[[Sequence[nn.Parameter]], object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limited:
    """The result of a limit of the norm for a batch.

    Attributes:
        norm: scalar, the norm of the gradients in scope before the limit.
        row_factor: float64 scalar of at most 1, by which the gradients of rows are still to be multiplied; None: none.
        factor: scalar of at most 1, by which dense gradients are multiplied; None: none.
    """

    norm: Tensor
    row_factor: Tensor | None = None
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The limits of a set of gradients.

    Attributes:
        norm: largest 2-norm of all of them together; 0: none.
        value: largest magnitude of an element of a dense gradient; 0: none.
        scope: gradients whose norm is limited.
    """

    norm: float = 0.0
    value: float = 0.0
    scope: Scope = "dense"

    @property
    def limits_rows(self) -> bool:
        """The norm of the gradients of rows is needed, and no row is updated before."""
        return self.norm > 0 and self.scope != "dense"

    @property
    def limits_dense(self) -> bool:
        """The norms of dense gradients are needed, and none is stepped with before."""
        return self.norm > 0 and self.scope != "rows"

    def apply(self, parameters: Iterable[nn.Parameter], row_squares: Tensor | None = None) -> Limited | None:
        """Clip the gradients of parameters, in place: elements first, then the norm.

        Args:
            parameters: those without a gradient are left out.
            row_squares: float64 scalar, squared norm of the gradients of rows; with `limits_rows`.

        Returns:
            What the limit of the norm did; None: there is none, or no gradient in its scope.
        """
        if not self.norm and not self.value:
            return None
        graded = [parameter for parameter in parameters if parameter.grad is not None]
        limited = self.limited(self.measure(graded), row_squares)
        if limited is not None:
            self.scale(graded, limited)
        return limited

    def measure(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Clip the elements of gradients, in place.

        Args:
            parameters: with gradients: all, or some after others, in their order.

        Returns:
            The norm of each gradient, for `limited`; empty if it does not count.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.value and gradients:
            nn.utils.clip_grad_value_(parameters, self.value)
        return _norms(gradients) if self.limits_dense else []

    def norms(self, parameters: Sequence[nn.Parameter], *, squares: bool = False) -> Tensor:
        """Clip the elements of gradients, in place, and measure each gradient.

        Args:
            parameters: at least one; each is the whole of a tensor or a share of it.
            squares: of shares, squares are wanted: they can be added.

        Returns:
            Float64 ``[parameters]``: norms, or their squares in float64 arithmetic; 0 without a gradient.
        """
        graded = [place for place, parameter in enumerate(parameters) if parameter.grad is not None]
        found = torch.zeros(len(parameters), dtype=torch.float64, device=parameters[0].device)
        own = [parameters[place] for place in graded]
        norms = self.measure(own)
        if squares and norms:
            norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() for p in own if p.grad is not None]
        if norms:
            found[graded] = torch.stack(norms).double()
        return found

    def limited(self, norms: Sequence[Tensor], row_squares: Tensor | None = None) -> Limited | None:
        """What the limit of the norm does.

        Args:
            norms: of all gradients, in order.
            row_squares: see `apply`.
        """
        if not self.norm:
            return None
        # As `torch.nn.utils.clip_grad_norm_`: the norm of the norms.
        total = torch.linalg.vector_norm(torch.stack([*norms])) if norms and self.limits_dense else None
        if not self.limits_rows:
            return None if total is None else Limited(norm=total, factor=_factor(self.norm, total))
        assert row_squares is not None, "measured before"
        squares = row_squares if total is None else row_squares + total.double().square()
        norm = squares.sqrt()
        factor = _factor(self.norm, norm)
        return Limited(norm=norm, row_factor=factor, factor=None if total is None else factor.to(total.dtype))

    def scale(self, parameters: Iterable[nn.Parameter], limited: Limited) -> None:
        """Multiply gradients by the factor of a limit, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients and limited.factor is not None:
            torch._foreach_mul_(gradients, limited.factor)


def listed(norms: Mapping[nn.Parameter, Tensor], parameters: Iterable[nn.Parameter]) -> Tensor:
    """Float64 ``[parameters]``: the norms that `Clip.norms` gave of some, in the order of all; 0 of the others."""
    own = [norms.get(parameter, parameter.new_zeros((), dtype=torch.float64)) for parameter in parameters]
    return torch.stack(own)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    if gradients and gradients[0].is_cuda:
        return list(torch._foreach_norm(gradients))
    return [torch.linalg.vector_norm(gradient) for gradient in gradients]


def _factor(limit: float, norm: Tensor) -> Tensor:
    return torch.clamp(limit / (norm + _EPS), max=1.0)


NO_CLIP = Clip()
