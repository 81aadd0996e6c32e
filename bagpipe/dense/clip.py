"""`Clip`: limits of gradients, between the backward and the optimizers' steps. Nothing waits for the device.

norm     all gradients times min(1, norm / (|all gradients| + 1e-6))      torch.nn.utils.clip_grad_norm_
value    each element to [-value, value]                                  torch.nn.utils.clip_grad_value_

The norm is that of the gradients in a scope: of dense parameters, of rows, or of all together. Rows are limited where
they are updated; here their factor is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["NO_CLIP", "Clip", "Limited", "Scope"]

#: Of `torch.nn.utils.clip_grad_norm_`.
_EPS = 1e-6

Scope = Literal["dense", "rows", "all"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limited:
    """The result of a limit of the norm for a batch.

    Attributes:
        norm: scalar, the norm of the gradients in scope before the limit.
        row_factor: float64 scalar of at most 1, by which the gradients of rows are still to be multiplied; None: none.
    """

    norm: Tensor
    row_factor: Tensor | None = None


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

    def apply(self, parameters: Iterable[nn.Parameter], row_squares: Tensor | None = None) -> Limited | None:
        """Clip the gradients of parameters, in place: elements first, then the norm.

        Args:
            parameters: those without a gradient are left out.
            row_squares: float64 scalar, squared norm of the gradients of rows; with `limits_rows`.

        Returns:
            What the limit of the norm did; None: there is none, or no gradient in its scope.
        """
        graded = [parameter for parameter in parameters if parameter.grad is not None]
        if self.value and graded:
            nn.utils.clip_grad_value_(graded, self.value)
        if self.limits_rows:
            assert row_squares is not None, "measured before"
            return self._apply_with_rows([p.grad for p in graded if p.grad is not None], row_squares)
        if self.norm and graded:
            return Limited(norm=nn.utils.clip_grad_norm_(graded, self.norm))
        return None

    def _apply_with_rows(self, gradients: list[Tensor], row_squares: Tensor) -> Limited:
        if self.scope == "rows":
            gradients = []
        squares = row_squares
        if gradients:
            squares = squares + nn.utils.get_total_norm(gradients).double().square()
        norm = squares.sqrt()
        factor = torch.clamp(self.norm / (norm + _EPS), max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return Limited(norm=norm, row_factor=factor)


NO_CLIP = Clip()
