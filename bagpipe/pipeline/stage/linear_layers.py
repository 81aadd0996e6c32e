"""`linear_layer`: the linear layer of an operator, if it has one, and how it can be divided over devices.

nodes of an operator:   (moves) ── nn.Linear | linear | addmm ── (light nodes)
                        none: rows                               all elementwise: columns
"""

from __future__ import annotations

from torch import fx, nn

from bagpipe.partition.operators import Linear
from bagpipe.split.operators import ModelParts, Operator, named_parameters, operands
from bagpipe.split.trace import function_name

__all__ = ["linear_layer"]

#: Functions and methods with one operand that compute every element from its own.
_ELEMENTWISE = frozenset(
    {"relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "elu", "leaky_relu", "softplus", "hardtanh", "dropout"}
)
_ELEMENTWISE_MODULES = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Dropout)


def linear_layer(parts: ModelParts, item: Operator) -> Linear | None:
    """The linear layer of an operator; None if it has none, or other parameters besides.

    Args:
        parts: the model.
        item: one of its operators.
    """
    weighted = [node for node in item.nodes if named_parameters(parts.traced, node)]
    if len(weighted) != 1:
        return None
    (node,) = weighted
    parameters = list(named_parameters(parts.traced, node).values())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    inputs = operands(node)
    if not _is_linear(parts, node) or len(matrices) != 1 or len(inputs) != 1:
        return None
    (matrix,) = matrices
    place = item.nodes.index(node)
    return Linear(
        weight_bytes=matrix.nbytes if matrix.requires_grad else 0,
        input_bytes=parts.shapes[inputs[0]].elements * matrix.itemsize,
        output_bytes=parts.shapes[node].elements * matrix.itemsize,
        columns=all(_is_elementwise(parts, each) for each in item.nodes[place + 1 :]),
        rows=place == 0,
    )


def _is_linear(parts: ModelParts, node: fx.Node) -> bool:
    return isinstance(parts.traced.called(node), nn.Linear) or function_name(node) in ("linear", "addmm")


def _is_elementwise(parts: ModelParts, node: fx.Node) -> bool:
    return isinstance(parts.traced.called(node), _ELEMENTWISE_MODULES) or function_name(node) in _ELEMENTWISE
