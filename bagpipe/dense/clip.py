"""`Clip`: limits of gradients, between the backward and the optimizers' steps. Nothing waits for the device.

norm     all gradients times min(1, norm / (|all gradients| + 1e-6))      torch.nn.utils.clip_grad_norm_
value    each element to [-value, value]                                  torch.nn.utils.clip_grad_value_
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["NO_CLIP", "Clip"]

#: Of `torch.nn.utils.clip_grad_norm_`.
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The limits of a set of gradients.

    Attributes:
        norm: largest 2-norm of all of them together; 0: none.
        value: largest magnitude of an element; 0: none.
    """

    norm: float = 0.0
    value: float = 0.0

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of parameters, in place: elements first, then the norm."""
        graded = [parameter for parameter in parameters if parameter.grad is not None]
        if self.value and graded:
            nn.utils.clip_grad_value_(graded, self.value)
        if self.norm and graded:
            nn.utils.clip_grad_norm_(graded, self.norm)

    def coefficient(self, gradients: Sequence[Tensor]) -> Tensor:
        """The factor, a scalar of at most 1, that limits the norm of all gradients together; at least one tensor."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        total = torch.linalg.vector_norm(torch.stack(norms))
        return torch.clamp(self.norm / (total + _EPS), max=1.0)


NO_CLIP = Clip()
