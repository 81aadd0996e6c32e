"""Operations and bytes of K-FAC by formula, for the placement of its work and for comparisons.

    LayerShape  ──flops──> COV_A, COV_G, X_INV, PRECOND        ──kept_bytes, sent_bytes──> of each way to divide K-FAC

    local    DP-KFAC (arXiv:2206.15143): factors of the owner's examples     travel: preconditioned gradients
    summed   factors of all examples, on the owner                           travel: factors to owners, gradients
    d-kfac   factors and inverses of all layers on every rank                travel: factors (all-reduce), inverses

The third one is what DP-KFAC's paper compares itself with; nothing here runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["KfacDivision", "LayerShape", "flops", "kept_bytes", "sent_bytes"]

KfacDivision = Literal["local", "summed", "d-kfac"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A linear layer.

    Attributes:
        num_inputs: dimension of factor A, the 1 of a bias included.
        num_outputs: dimension of factor G.
    """

    num_inputs: int
    num_outputs: int

    @property
    def factor_elements(self) -> int:
        """Elements of both factors."""
        return self.num_inputs**2 + self.num_outputs**2

    @property
    def weights(self) -> int:
        """Elements of the gradient."""
        return self.num_inputs * self.num_outputs


def flops(layer: LayerShape, num_examples: int) -> Mapping[str, float]:
    """Floating-point operations of a layer by operation; F and B beside them.

    A product of an [m, k] and a [k, n] matrix takes 2 m k n, a Cholesky factorisation n³ / 3, and the inverse from it
    2 n³ / 3.

    Args:
        layer: the layer.
        num_examples: of a micro-batch, for F, B, COV_A and COV_G.
    """
    a, g = layer.num_inputs, layer.num_outputs
    return {
        "F": 2.0 * num_examples * layer.weights,
        "B": 4.0 * num_examples * layer.weights,
        "COV_A": 2.0 * num_examples * a * a,
        "COV_G": 2.0 * num_examples * g * g,
        "X_INV": float(a**3 + g**3),
        "PRECOND": 2.0 * layer.weights * (a + g),
    }


def kept_bytes(
    layers: Iterable[LayerShape], division: KfacDivision, *, num_ranks: int, rank: int = 0, element_bytes: int = 4
) -> int:
    """Bytes of factors and inverses on a rank.

    Args:
        layers: of the model, in order.
        division: how K-FAC is divided.
        num_ranks: that hold the layers.
        rank: which of them.
        element_bytes: of an element.
    """
    own = [each for n, each in enumerate(layers) if division == "d-kfac" or n % num_ranks == rank]
    return 2 * element_bytes * sum(layer.factor_elements for layer in own)


def sent_bytes(
    layers: Iterable[LayerShape],
    division: KfacDivision,
    *,
    num_ranks: int,
    factor_every: int = 1,
    inverse_every: int = 1,
    element_bytes: int = 4,
) -> float:
    """Bytes that all ranks together send in a step for K-FAC, on average; the all-reduce of gradients is not counted.

    A broadcast sends its bytes to ``num_ranks - 1`` ranks; an all-reduce sends them twice per rank but one (ring).

    Args:
        layers: of the model, in order.
        division: how K-FAC is divided.
        num_ranks: that hold the layers.
        factor_every, inverse_every: batches between two updates.
        element_bytes: of an element.
    """
    found = list(layers)
    factors = sum(layer.factor_elements for layer in found)
    elements = {
        "local": float(sum(layer.weights for layer in found)),
        "summed": sum(layer.weights for layer in found) + factors / factor_every,
        "d-kfac": 2 * factors / factor_every + factors / inverse_every,
    }
    return elements[division] * (num_ranks - 1) * element_bytes
