"""`ModelParts`: the embedding nodes of a traced model, and the operators of its dense part.

    sparse ──collections──> reshaping, selection, concatenation ──> embedding values ──┐
    dense ─────────────────────────────────────────────────────────────────────────────┴──> operators ──> outputs

*Embedding nodes* are the collections, nodes that move their vectors without making them larger, and every node with an
operand that is not a tensor with a row per example (lists, ids, unpooled vectors). They have no parameters.

An *operator* is a node with the light nodes behind it that have no parameters and no other operands, and with the nodes
before it that move a shared result for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from bagpipe.errors import InputError
from bagpipe.split.shape_propagation import NodeShape, propagate_shapes, rows_of
from bagpipe.split.trace import Traced, function_name

__all__ = ["ModelParts", "Operator", "classify_nodes", "is_glue", "named_parameters", "operands"]

#: Functions and methods that move elements without arithmetic.
_MOVES = frozenset(
    {
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "reshape",
        "view",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "index_select",
        "narrow",
        "select",
        "split",
        "tensor_split",
        "chunk",
        "unbind",
        "getitem",
        "getattr",
        "values",
        "to_dict",
        "contiguous",
        "keys",
        "to",
    }
)

#: Functions without parameters that form their own operator, since they cost as much as a layer.
_HEAVY = frozenset(
    {
        "matmul",
        "bmm",
        "mm",
        "baddbmm",
        "addmm",
        "einsum",
        "scaled_dot_product_attention",
        "linear",
        "conv1d",
        "tensordot",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The unit of placement.

    Attributes:
        name: path of its first node.
        nodes: in order.
        inputs: numbers of the operators that feed it, ascending.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelParts:
    """A traced model with its nodes classified.

    Attributes:
        traced: the model; only tensors and values made of ids flow between its nodes.
        shapes: per node.
        dense: the node of the dense input.
        embedding_nodes: nodes of the embedding stage without the inputs, in order.
        operators: of the dense part, in topological order.
        heads: the model's outputs.
    """

    traced: Traced
    shapes: Mapping[fx.Node, NodeShape]
    dense: fx.Node
    embedding_nodes: tuple[fx.Node, ...]
    operators: tuple[Operator, ...]
    heads: tuple[fx.Node, ...]

    @property
    def dense_nodes(self) -> tuple[fx.Node, ...]:
        """Nodes of the operators, in graph order."""
        mine = {node for item in self.operators for node in item.nodes}
        return tuple(node for node in self.traced.graph.nodes if node in mine)


def classify_nodes(traced: Traced, *, num_dense: int, dtype: torch.dtype) -> ModelParts:
    """Classify the nodes of a traced model.

    Raises:
        InputError: the model fails on a fake batch; it applies parameters to unpooled vectors; an output does not
            depend on the dense part, or does not have one row per example.
    """
    shapes = propagate_shapes(traced, num_dense=num_dense, dtype=dtype)
    dense, sparse = (node for node in traced.graph.nodes if node.op == "placeholder")
    source = _source(traced, shapes, dense, sparse)
    heads = _heads(traced)
    outside = {dense, sparse, *source}
    operators = _operators(traced, shapes, outside)
    for number, head in enumerate(heads):
        if head in outside:
            raise InputError(f"output {number} of model {type(traced.model).__name__} depends on no dense operator")
        if not shapes[head].by_example:
            raise InputError(
                f"output {number} of model {type(traced.model).__name__} must be logits, one or more per example, got "
                f"shape {shapes[head].shape} from {traced.paths[head]}"
            )
    return ModelParts(
        traced=traced, shapes=shapes, dense=dense, embedding_nodes=tuple(source), operators=operators, heads=heads
    )


def is_glue(node: fx.Node) -> bool:
    """Whether a node is copied into every stage that uses it: parameters, buffers, numbers of examples."""
    return node.op == "get_attr" or node.target is rows_of


def operands(node: fx.Node) -> list[fx.Node]:
    """Nodes whose results a node takes or reads the number of examples from, without parameters and buffers."""
    found: list[fx.Node] = []
    for source in node.all_input_nodes:
        found.extend(source.all_input_nodes if source.target is rows_of else [source])
    return [source for source in dict.fromkeys(found) if source.op != "get_attr"]


def named_parameters(traced: Traced, node: fx.Node) -> dict[str, nn.Parameter]:
    """Name in the model -> parameter, of all parameters that a node applies."""
    found = traced.parameters_of(node)
    for attribute in node.all_input_nodes:
        if attribute.op == "get_attr":
            found |= traced.parameters_of(attribute)
    return found


def _source(
    traced: Traced, shapes: Mapping[fx.Node, NodeShape], dense: fx.Node, sparse: fx.Node
) -> tuple[fx.Node, ...]:
    source = {sparse}
    for node in traced.graph.nodes:
        inputs = operands(node)
        mine = [n for n in inputs if n in source]
        if node.op in ("placeholder", "output") or is_glue(node) or not mine:
            continue
        loose = next((n for n in mine if not shapes[n].by_example), None)
        parameters = named_parameters(traced, node)
        late = [n for n in inputs if n not in source and n is not dense]
        if loose is not None and (parameters or late):
            why = f"parameter {min(parameters)!r}" if parameters else f"{traced.paths[late[0]]} of the dense part"
            raise InputError(
                f"{traced.paths[node]}: combines {why} with {traced.paths.get(loose, loose.name)}, which has not one "
                "row per example; pool embeddings and make them a tensor first"
            )
        moves = _is_move(node, shapes) or not shapes[node].is_tensor
        if loose is not None or (not parameters and len(mine) == len(inputs) and moves):
            source.add(node)
    return tuple(node for node in traced.graph.nodes if node in source and node is not sparse)


def _is_move(node: fx.Node, shapes: Mapping[fx.Node, NodeShape]) -> bool:
    """Whether a node only moves elements into a tensor with a row per example, no larger than its operands."""
    shape = shapes[node]
    taken = sum(shapes[n].elements for n in operands(node))
    return function_name(node) in _MOVES and shape.by_example and shape.elements <= taken


def _heads(traced: Traced) -> tuple[fx.Node, ...]:
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    result = output.args[0]
    heads = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if not heads or not all(isinstance(head, fx.Node) for head in heads):
        kind = "dict" if isinstance(result, dict) else type(result).__name__
        raise InputError(f"model {type(traced.model).__name__} must return logits or a tuple of them, got {kind}")
    return heads


def _operators(traced: Traced, shapes: Mapping[fx.Node, NodeShape], outside: set[fx.Node]) -> tuple[Operator, ...]:
    """Groups of dense nodes, numbered in the order of their first nodes."""
    owner: dict[fx.Node, int] = {}
    members: dict[int, list[fx.Node]] = {}
    handed: dict[fx.Node, fx.Node] = {}  # moves that go with their user -> the moved node
    for node in traced.graph.nodes:
        if node in outside or node.op == "output" or is_glue(node):
            continue
        if _goes_with_user(node, shapes, outside):
            handed[node] = operands(node)[0]
            continue
        taken = [_behind(source, handed) for source in operands(node)]
        inputs = [source for source in taken if source not in outside]
        fed_by = {owner[source] for source in inputs}
        loose = sorted({owner[source] for source in inputs if not shapes[source].by_example})
        light = not named_parameters(traced, node) and function_name(node) not in _HEAVY
        if loose:
            number = loose[0]
            for other in loose[1:]:
                members[number].extend(members.pop(other))
                owner.update(dict.fromkeys(members[number], number))
        elif light and len(fed_by) == 1 and len(inputs) == len(taken):
            (number,) = fed_by
        else:
            number = len(owner)  # unused: there are at most as many groups as nodes
        group = [node, *_handed_to(node, handed)]
        owner.update(dict.fromkeys(group, number))
        members.setdefault(number, []).extend(group)
    position = {node: number for number, node in enumerate(traced.graph.nodes)}
    groups = _topological(members, owner, position)
    numbers = {group: number for number, group in enumerate(groups)}
    return tuple(
        Operator(
            name=traced.paths[members[group][0]],
            nodes=tuple(sorted(members[group], key=position.__getitem__)),
            inputs=tuple(sorted(numbers[g] for g in _feeding(members, owner, group))),
        )
        for group in groups
    )


def _goes_with_user(node: fx.Node, shapes: Mapping[fx.Node, NodeShape], outside: set[fx.Node]) -> bool:
    """Whether a move of a shared result belongs to its only user: apart from it, the elements would be sent twice."""
    taken = operands(node)
    users = [user for user in node.users if user.op != "output"]
    return (
        function_name(node) in _MOVES
        and len(taken) == 1 == len(users) == len(node.users)
        and taken[0] not in outside
        and len(taken[0].users) > 1
        and shapes[node].by_example
        and shapes[taken[0]].by_example
        and not is_glue(users[0])
    )


def _behind(node: fx.Node, handed: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node in handed:
        node = handed[node]
    return node


def _handed_to(node: fx.Node, handed: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Moves that belong to a node, directly or through other moves."""
    found = [source for source in operands(node) if source in handed]
    return [*found, *(deeper for source in found for deeper in _handed_to(source, handed))]


def _feeding(members: Mapping[int, list[fx.Node]], owner: Mapping[fx.Node, int], group: int) -> set[int]:
    return {owner[n] for node in members[group] for n in operands(node) if n in owner} - {group}


def _topological(
    members: Mapping[int, list[fx.Node]], owner: Mapping[fx.Node, int], position: Mapping[fx.Node, int]
) -> list[int]:
    """Groups in the order of their first nodes, each after the groups that feed it."""
    left = {group: _feeding(members, owner, group) for group in members}
    order: list[int] = []
    while left:
        ready = [group for group, needs in left.items() if not needs.intersection(left)]
        if not ready:
            raise InputError("operators that share a result that is not a tensor feed each other in a cycle")
        first = min(ready, key=lambda group: min(position[n] for n in members[group]))
        order.append(first)
        del left[first]
    return order
