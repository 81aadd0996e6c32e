"""`extract`: copies nodes of a traced model into a module that maps tensors to tensors.

    an input or output = one node, or a bundle: results side by side in a tensor ``[num_examples, sum of sizes]``

The module shares submodules, parameters and buffers with the model. It reads the number of examples from its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from bagpipe.split.operators import ModelParts, is_glue

__all__ = ["Bundle", "extract"]

#: Nodes whose results form one tensor.
Bundle = tuple[fx.Node, ...]


def extract(
    parts: ModelParts, name: str, nodes: Iterable[fx.Node], inputs: Sequence[Bundle], outputs: Sequence[Bundle]
) -> fx.GraphModule:
    """A module with positional `inputs` that returns the tuple of `outputs`.

    Args:
        parts: the model.
        name: of the module's class.
        nodes: in graph order; their operands are among them, in `inputs`, or glue that is copied (`is_glue`).
        inputs, outputs: bundles; the nodes of a bundle have one row per example and the same dtype.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    taken = [graph.placeholder(bundle[0].name) for bundle in inputs]
    for bundle, tensor in zip(inputs, taken, strict=True):
        copies.update(zip(bundle, _unpacked(parts, graph, bundle, tensor), strict=True))
    for node in nodes:
        for source in node.all_input_nodes:
            if is_glue(source) and source not in copies:
                copies[source] = graph.node_copy(source, copies.__getitem__)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(_packed(parts, graph, bundle, [copies[node] for node in bundle]) for bundle in outputs))
    module = fx.GraphModule(parts.traced.module, graph, class_name=name)
    module.training = parts.traced.model.training
    return module


def _packed(parts: ModelParts, graph: fx.Graph, bundle: Bundle, tensors: Sequence[fx.Node]) -> fx.Node:
    if len(bundle) == 1:
        return tensors[0]
    flat = []
    for node, tensor in zip(bundle, tensors, strict=True):
        dims = len(parts.shapes[node].shape)
        if dims == 0:
            tensor = graph.call_method("unsqueeze", (tensor, 1))
        elif dims > 1:
            tensor = graph.call_method("flatten", (tensor, 1))
        flat.append(tensor)
    return graph.call_function(torch.cat, (flat, 1))


def _unpacked(parts: ModelParts, graph: fx.Graph, bundle: Bundle, tensor: fx.Node) -> list[fx.Node]:
    if len(bundle) == 1:
        return [tensor]
    # `split` has one backward; each slice would make a gradient of the whole tensor.
    pieces = graph.call_function(torch.split, (tensor, [parts.shapes[node].elements for node in bundle], 1))
    found = []
    for position, node in enumerate(bundle):
        shape = parts.shapes[node].shape
        piece = graph.call_function(operator.getitem, (pieces, position))
        if not shape:
            piece = graph.call_method("squeeze", (piece, 1))
        elif len(shape) > 1:
            piece = graph.call_method("unflatten", (piece, 1, shape))
        found.append(piece)
    return found
