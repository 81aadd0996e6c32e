"""Backward of one micro-batch through a stage: at once, or the gradients of its inputs first and its weights later.

    B   one pass: leaves get their gradients, parameters add them up
    I   gradients of the inputs; what the weights' gradients start from is kept      W   gradients of the weights

The split is PyTorch's (torch.distributed.pipelining). It finds a weight through what the weight and an input both lead
to, and so loses weights that no input with a gradient meets, silently. A stage with such weights is told by one look at
its first micro-batch: its I then makes both halves' gradients, its W only adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import _backward as torch_split
from torch.nn import Parameter

__all__ = ["Graph", "Kept", "SplitBackward", "backward"]


@dataclass(slots=True, eq=False)
class Graph:
    """The forward of one micro-batch, as autograd has it.

    Attributes:
        leaves: inputs that want a gradient.
        roots: outputs that get one, and the loss last, if there is one.
    """

    leaves: list[Tensor]
    roots: list[Tensor]


def backward(graph: Graph, gradients: Sequence[Tensor]) -> None:
    """Full backward; adds to the ``grad`` of leaves and parameters.

    Args:
        graph: is freed.
        gradients: of the roots, one fewer if the last root is a loss: its own is 1.
    """
    roots, given = _wanting(graph.roots, gradients)
    if roots:
        torch.autograd.backward(roots, given)


def _wanting(roots: list[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The roots that depend on a leaf or a parameter, and their gradients."""
    given = [*gradients, *(torch.ones_like(root) for root in roots[len(gradients) :])]
    pairs = [pair for pair in zip(roots, given, strict=True) if pair[0].requires_grad]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


@dataclass(slots=True, eq=False)
class Kept:
    """What W needs of I: where the weights' gradients start from, or they themselves, or everything."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    gradients: tuple[Tensor | None, ...] = ()
    whole: tuple[list[Tensor], list[Tensor]] | None = None


class SplitBackward:
    """I and W of one stage.

    Args:
        parameters: trainable ones of the stage.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._reaches_all: bool | None = None

    def inputs(self, graph: Graph, gradients: Sequence[Tensor]) -> Kept:
        """I: adds to the ``grad`` of the leaves. Gradients as for `backward`; returns what `weights` takes."""
        roots, given = _wanting(graph.roots, gradients)
        if not roots or not self._parameters:
            if roots:
                torch.autograd.backward(roots, given)
            return Kept()
        if not graph.leaves:  # nobody waits for I
            return Kept(whole=(roots, given))
        if self._reaches_all is None:
            self._reaches_all = _reaches_all(roots, graph.leaves, self._parameters)
        if not self._reaches_all:
            wanted = [*graph.leaves, *self._parameters]
            found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
            for leaf, gradient in zip(graph.leaves, found, strict=False):
                leaf.grad = gradient
            return Kept(gradients=found[len(graph.leaves) :])
        # The split detaches its roots in place: impossible for views, and wrong for what another root was made of.
        root, one = _as_one_root(roots, given), given[0].new_ones(())
        _, groups = torch_split.stage_backward_input([root], [one], graph.leaves, iter(self._parameters))
        for group in groups:
            _sort(group)
        return Kept(groups=groups)

    def weights(self, kept: Kept) -> None:
        """W: adds to the ``grad`` of the parameters."""
        if kept.whole is not None:
            torch.autograd.backward(*kept.whole)
            return
        fresh = [parameter for parameter in self._parameters if parameter.grad is None]
        if kept.groups:
            # Groups may pass through the same nodes, so none may free them; they go with `kept`.
            torch_split.stage_backward_weight(iter(self._parameters), kept.groups, retain_graph=True)
        for parameter, gradient in zip(self._parameters, kept.gradients, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for parameter in fresh:
            if parameter.grad is not None:
                # Two weights that are added up get one tensor, to which the next micro-batch would add twice.
                parameter.grad = parameter.grad.clone()


def _reaches_all(roots: Sequence[Tensor], leaves: Sequence[Tensor], parameters: Sequence[Parameter]) -> bool:
    """Whether the split finds every parameter that the roots depend on."""

    def nodes(tensors: Sequence[Tensor]) -> list[Any]:
        return [torch_split._get_grad_fn_or_grad_acc(tensor) for tensor in tensors]

    weights = nodes(parameters)
    reverse = torch_split.construct_reverse_graph(nodes(roots))
    groups = torch_split.get_param_groups(nodes(leaves), weights, reverse)
    found = {node for group in groups for node in group["params"]}
    return all(node in found for node in weights if reverse.get(node))


def _sort(group: dict[str, Any]) -> None:
    """Nodes of a group in the order in which the forward made them; as found, they are in the order of addresses.

    Where three or more terms of a gradient meet, their order decides its last bits.
    """
    nodes = group["intermediates"]
    if len(nodes) > 1:
        order = sorted(range(len(nodes)), key=lambda number: -nodes[number]._sequence_nr())
        group["intermediates"] = [nodes[number] for number in order]
        group["grads"] = [group["grads"][number] for number in order]


def _as_one_root(roots: list[Tensor], given: list[Tensor]) -> Tensor:
    """A scalar whose gradient 1 gives each root the gradient it was given."""
    root: Tensor = _Root.apply(given, *roots)  # type: ignore[no-untyped-call]
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *roots: Tensor) -> Tensor:
        ctx.given = given
        return roots[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.given)
