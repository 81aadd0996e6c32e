"""`LayerFactors`: K-FAC of one linear layer: factors, their inverses, and the preconditioned gradient.

    sums of a batch ──fold──> A = E[a aᵀ], G = E[g gᵀ] (running averages) ──invert──> (A + π√γ I)⁻¹, (G + √γ/π I)⁻¹
    gradient V = [dW | db] ──precondition──> (G + √γ/π I)⁻¹ V (A + π√γ I)⁻¹

a: inputs of the layer with 1 appended for a bias. g: gradients of the loss of one example with respect to the outputs.
γ: damping. π = √((tr A / dim A) / (tr G / dim G)), the trace rule of Martens and Grosse (arXiv:1503.05671, section
6.3). The preconditioned gradient is the inverse of ``(G + √γ/π I) ⊗ (A + π√γ I)`` times the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bagpipe.errors import InputError
from bagpipe.pipeline.stream import keep_for_current_stream

__all__ = ["BatchSums", "LayerFactors", "damping_ratio"]


@dataclass(slots=True, kw_only=True, eq=False)
class BatchSums:
    """Sums over the examples of one batch.

    Attributes:
        inputs: ``[num_inputs, num_inputs]``, sum of a aᵀ.
        outputs: ``[num_outputs, num_outputs]``, sum of g gᵀ.
        counts: float64 ``[2]`` on the host: number of terms of `inputs`, and examples of `outputs`. A layer that is
            called on sequences, or several times, has a term for each place of an example ("expand", arXiv:2311.00636).
    """

    inputs: Tensor
    outputs: Tensor
    counts: Tensor

    @classmethod
    def zeros(cls, num_inputs: int, num_outputs: int, like: Tensor) -> BatchSums:
        """Sums over no example, with the dtype and device of a tensor; of float32 where that is a half."""
        dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
        return cls(
            inputs=torch.zeros(num_inputs, num_inputs, dtype=dtype, device=like.device),
            outputs=torch.zeros(num_outputs, num_outputs, dtype=dtype, device=like.device),
            counts=torch.zeros(2, dtype=torch.float64),
        )

    def add_inputs(self, inputs: Tensor, *, has_bias: bool) -> None:
        """Add the inputs of some examples, ``[..., features]``."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).to(self.inputs.dtype)
        if has_bias:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        self.inputs.addmm_(rows.T, rows)
        self.counts[0] += len(rows)

    def add_outputs(self, gradients: Tensor, factor: float) -> None:
        """Add gradients of the loss with respect to outputs, ``[..., features]``. The caller counts the examples.

        Args:
            gradients: of a loss that is `factor` times smaller than the sum of the examples' losses.
            factor: examples of the global batch, divided by the loss scale.
        """
        rows = gradients.detach().reshape(-1, gradients.shape[-1]).to(self.outputs.dtype) * factor
        self.outputs.addmm_(rows.T, rows)

    def add(self, other: BatchSums) -> None:
        """Add the sums over other examples of the batch."""
        self.inputs += other.inputs
        self.outputs += other.outputs
        self.counts += other.counts


class LayerFactors:
    """Factors and inverses of one layer, on the rank that owns it.

    Args:
        name: of the layer, for messages.
        decay: weight of the average before, in [0, 1).
        damping: γ, at least 0.

    Attributes:
        factor_a: ``[num_inputs, num_inputs]`` running average of A; None: no batch was folded in.
        factor_g: ``[num_outputs, num_outputs]`` running average of G.
        inverse_a, inverse_g: of the damped factors; None: the layer keeps its plain gradient.
    """

    def __init__(self, name: str, *, decay: float, damping: float) -> None:
        self.name = name
        self.factor_a: Tensor | None = None
        self.factor_g: Tensor | None = None
        self.inverse_a: Tensor | None = None
        self.inverse_g: Tensor | None = None
        self._decay = decay
        self._damping = damping

    def fold(self, sums: BatchSums) -> None:
        """Take a batch into the averages. The first one is the average; one without examples changes nothing."""
        num_terms, num_examples = sums.counts.tolist()
        if not num_terms or not num_examples:
            return
        keep_for_current_stream(sums.inputs)  # another lane can have made them
        keep_for_current_stream(sums.outputs)
        batch_a, batch_g = sums.inputs / num_terms, sums.outputs / num_examples
        if self.factor_a is None or self.factor_g is None:
            self.factor_a, self.factor_g = batch_a, batch_g
        else:
            self.factor_a.lerp_(batch_a, 1 - self._decay)
            self.factor_g.lerp_(batch_g, 1 - self._decay)

    def invert(self) -> None:
        """Invert the damped factors.

        Raises:
            InputError: a damped factor is singular.
        """
        if self.factor_a is None or self.factor_g is None:
            return
        ratio, root = damping_ratio(self.factor_a, self.factor_g), math.sqrt(self._damping)
        self.inverse_a = self._inverse("A", self.factor_a, ratio * root)
        self.inverse_g = self._inverse("G", self.factor_g, root / ratio)

    def _inverse(self, which: str, factor: Tensor, shift: Tensor) -> Tensor:
        damped = factor.clone()
        damped.diagonal().add_(shift)
        triangle, info = torch.linalg.cholesky_ex(damped)
        is_singular = bool(info.item()) or (self._damping == 0 and _is_rank_deficient(triangle))
        if is_singular and bool(torch.isfinite(factor).all()):
            raise InputError(
                f"K-FAC: factor {which} of layer {self.name}, of dimension {len(factor)}, is singular with damping "
                f"{self._damping:g}; expected more damping"
            )
        # What is not finite stays so: the check of gradients says which batch it came from.
        # Rows contiguous, as a checkpoint brings it back: products of another layout round differently.
        return torch.cholesky_inverse(triangle).contiguous()

    def copy(self) -> Mapping[str, Tensor | None]:
        """The factors and inverses by name, in memory that stays as it is."""
        own = {name: getattr(self, name) for name in ("factor_a", "factor_g")}
        copies = {name: None if factor is None else factor.clone() for name, factor in own.items()}
        return {**copies, "inverse_a": self.inverse_a, "inverse_g": self.inverse_g}  # new ones replace these

    def precondition(self, gradient: Tensor) -> Tensor:
        """The preconditioned gradient; the gradient itself before the first inversion.

        Args:
            gradient: ``[num_outputs, num_inputs]``.
        """
        if self.inverse_a is None or self.inverse_g is None:
            return gradient
        dtype = self.inverse_a.dtype
        return (self.inverse_g @ gradient.to(dtype) @ self.inverse_a).to(gradient.dtype)


def damping_ratio(factor_a: Tensor, factor_g: Tensor) -> Tensor:
    """π, a scalar; 1 where a trace is 0."""
    mean_a, mean_g = factor_a.diagonal().mean(), factor_g.diagonal().mean()
    ratio = torch.sqrt(mean_a / mean_g)
    return torch.where((mean_a > 0) & (mean_g > 0), ratio, torch.ones_like(ratio))


def _is_rank_deficient(triangle: Tensor) -> bool:
    """Whether rounding alone keeps a pivot of a Cholesky factor above 0: LAPACK's criterion for pivoted ones."""
    pivots = triangle.diagonal() ** 2
    return bool(pivots.min() <= len(pivots) * torch.finfo(pivots.dtype).eps * pivots.max())
