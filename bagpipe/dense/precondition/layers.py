"""`LinearLayer`: a layer that K-FAC preconditions; and how the layers of a model are found and owned.

model ──linear_layers──> LinearLayer, in the order of the model's parameters ──owners──> rank l mod N owns layer l

Parameters of other modules keep their plain gradient: norms, embeddings, weights used by functions. A convolution is
refused: its factors are sums over places of an image, which nothing here computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from bagpipe.errors import InputError

__all__ = ["LinearLayer", "combined_gradient", "factor_bytes", "linear_layers", "owners", "set_gradient"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearLayer:
    """A linear layer ``y = W a + b`` with trainable weights.

    Attributes:
        name: of its module in the whole model.
        module: computes it.
        weight: ``[num_outputs, num_inputs]``.
        bias: ``[num_outputs]``; None: it has none, or it is not trained. It is the column of an appended input of 1.
    """

    name: str
    module: nn.Linear
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def num_inputs(self) -> int:
        """Dimension of factor A: inputs, and 1 for the bias."""
        return self.weight.shape[1] + (self.bias is not None)

    @property
    def num_outputs(self) -> int:
        """Dimension of factor G."""
        return self.weight.shape[0]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def linear_layers(module: nn.Module, names: Mapping[int, str] | None = None) -> tuple[LinearLayer, ...]:
    """The linear layers of a model or of one of its stages, in the order of its modules.

    Args:
        module: the model or stage.
        names: id of a parameter -> its name in the whole model; None: names of `module`.

    Raises:
        InputError: a trainable parameter is that of a convolution, a weight is parametrized, or two layers share one.
    """
    known = {id(p): name for name, p in module.named_parameters()} if names is None else names
    found: list[LinearLayer] = []
    weights: dict[int, str] = {}
    for path, each in module.named_modules():
        trained = [parameter for parameter in each.parameters(recurse=False) if parameter.requires_grad]
        if isinstance(each, _ConvNd) and trained:
            raise InputError(
                f"K-FAC needs linear layers: {path} is a {type(each).__name__}, whose factors are not supported"
            )
        if not isinstance(each, nn.Linear) or not each.weight.requires_grad:
            continue
        if is_parametrized(each):
            raise InputError(f"K-FAC needs plain weights: {path} is parametrized ({type(each).__name__})")
        weight = each.get_parameter("weight")
        name = known[id(weight)].removesuffix(".weight")
        if id(weight) in weights:
            raise InputError(
                f"K-FAC: layers {weights[id(weight)]} and {path} share a weight, expected one layer for each"
            )
        weights[id(weight)] = path
        bias = each.get_parameter("bias") if each.bias is not None and each.bias.requires_grad else None
        found.append(LinearLayer(name=name, module=each, weight=weight, bias=bias))
    return tuple(found)


def owners(num_layers: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The rank that owns each layer: layer l belongs to ``ranks[l mod N]`` (arXiv:2206.15143, section 3).

    Args:
        num_layers: number of layers.
        ranks: that hold the layers.
    """
    return tuple(ranks[layer % len(ranks)] for layer in range(num_layers))


def factor_bytes(
    owned: Sequence[LinearLayer], summed: Sequence[LinearLayer] = (), *, lag: int = 0, copies: int = 0
) -> int:
    """Bytes that a rank keeps of K-FAC: factors and inverses of its layers, and sums of a batch, or of two with a lag.

    Args:
        owned: layers of the rank.
        summed: all layers, if their sums go to owners: they lie in the buffers that are sent and received, too.
        lag: of the inverses.
        copies: of factors and inverses that are kept besides.
    """
    kept = [*((layer, 2 + 2 * copies) for layer in owned), *((layer, 1 + lag) for layer in summed or owned)]
    kept += [(layer, 2) for layer in summed]
    return sum(
        count * layer.weight.element_size() * (layer.num_inputs**2 + layer.num_outputs**2) for layer, count in kept
    )


def combined_gradient(layer: LinearLayer) -> Tensor | None:
    """``[num_outputs, num_inputs]``: gradient of the weight, that of the bias as its last column; None: it has none."""
    if layer.weight.grad is None or layer.bias is None:
        return layer.weight.grad
    bias = torch.zeros_like(layer.bias) if layer.bias.grad is None else layer.bias.grad
    return torch.cat([layer.weight.grad, bias.unsqueeze(1)], dim=1)


def set_gradient(layer: LinearLayer, gradient: Tensor) -> None:
    """Replace the gradient of a layer that has one.

    Args:
        layer: the layer.
        gradient: as `combined_gradient`.
    """
    for parameter, value in zip(
        layer.parameters, (gradient[:, : layer.weight.shape[1]], gradient[:, -1]), strict=False
    ):
        if parameter.grad is None:
            parameter.grad = value.clone()
        else:
            parameter.grad.copy_(value)
