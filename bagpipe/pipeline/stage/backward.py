"""Backward of one micro-batch through a stage: full, or split into input gradients and weight gradients.

    B   full backward: gradients of leaves, and accumulated gradients of parameters
    I   gradients of the inputs; keeps the starting points of the weight gradients      W   gradients of the weights

The split is PyTorch's (torch.distributed.pipelining). It finds a weight through the autograd nodes that the weight and
an input have in common. It silently misses weights that share no node with an input that needs a gradient. The first
micro-batch of a stage detects such weights; then I computes all gradients and W only accumulates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import _backward as torch_split
from torch.nn import Parameter

from bagpipe.errors import JobError

__all__ = ["Graph", "Kept", "SplitBackward", "backward", "hooks_of"]


@dataclass(slots=True, eq=False)
class Graph:
    """Autograd graph of the forward of one micro-batch.

    Attributes:
        leaves: inputs that need a gradient.
        roots: outputs that get a gradient, followed by the loss if there is one.
        split: makes I and W; None: there are none.
        kept: by I, for W.
    """

    leaves: list[Tensor]
    roots: list[Tensor]
    split: SplitBackward | None = None
    kept: Kept | None = None

    def backward(self, gradients: Sequence[Tensor]) -> None:
        """B; see `backward`."""
        backward(self, gradients)

    def backward_inputs(self, gradients: Sequence[Tensor]) -> None:
        """I; see `SplitBackward.inputs`."""
        assert self.split is not None, "the schedule has I"
        self.kept = self.split.inputs(self, gradients)
        self.leaves, self.roots = [], []

    def backward_weights(self) -> None:
        """W; see `SplitBackward.weights`.

        Raises:
            JobError: there was no I.
        """
        if self.split is None or self.kept is None:
            raise JobError("a W came before its I: the schedule was not checked")
        self.split.weights(self.kept)


def backward(graph: Graph, gradients: Sequence[Tensor]) -> None:
    """Full backward. Adds to the ``grad`` of leaves and parameters.

    Args:
        graph: the graph; freed.
        gradients: gradients of the roots; without that of a loss, it is 1.
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
    """State that I keeps for W: starting points of the weight gradients, the gradients, or a full backward."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    gradients: tuple[Tensor | None, ...] = ()
    whole: tuple[list[Tensor], list[Tensor]] | None = None


class SplitBackward:
    """I and W of one stage.

    Args:
        parameters: trainable parameters of the stage.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._reaches_all: dict[int, bool] = {}  # by the number of leaves: a partial backward can have fewer

    def inputs(self, graph: Graph, gradients: Sequence[Tensor]) -> Kept:
        """I: adds to the ``grad`` of the leaves. Gradients as for `backward`. Returns the argument of `weights`."""
        roots, given = _wanting(graph.roots, gradients)
        if not roots or not self._parameters:
            if roots:
                torch.autograd.backward(roots, given)
            return Kept()
        if not graph.leaves:  # no other stage waits for I
            return Kept(whole=(roots, given))
        if len(graph.leaves) not in self._reaches_all:
            self._reaches_all[len(graph.leaves)] = _reaches_all(roots, graph.leaves, self._parameters)
        if not self._reaches_all[len(graph.leaves)]:
            wanted = [*graph.leaves, *self._parameters]
            found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
            for leaf, gradient in zip(graph.leaves, found, strict=False):
                leaf.grad = gradient
            return Kept(gradients=found[len(graph.leaves) :])
        # The split detaches its roots in place. This fails for views and is wrong for roots that depend on each other.
        root, one = _as_one_root(roots, given), given[0].new_ones(())
        _, groups = torch_split.stage_backward_input([root], [one], graph.leaves, iter(self._parameters))
        for group in groups:
            _sort(group)
        return Kept(groups=groups)

    def weights(self, kept: Kept) -> None:
        """W: adds to the ``grad`` of the parameters, and calls their hooks after it, as a backward does."""
        if kept.whole is not None:
            torch.autograd.backward(*kept.whole)
            return
        if not any(hooks_of(parameter) for parameter in self._parameters):
            self._add(self._parameters, kept.groups, kept.gradients)
            return
        # Hooks can take gradients away, so they come one after the other.
        for group in kept.groups:
            self._add([node.variable for node in group["params"]], [group], ())
        for parameter, gradient in zip(self._parameters, kept.gradients, strict=False):
            if gradient is not None:
                self._add([parameter], [], [gradient])

    def gradients(self, kept: Kept) -> Sequence[Tensor | None]:
        """W without its effects: a gradient of each parameter, None for one that the roots do not depend on."""
        if kept.whole is not None:
            return torch.autograd.grad(kept.whole[0], self._parameters, kept.whole[1], allow_unused=True)
        if kept.gradients or not kept.groups:
            return kept.gradients or (None,) * len(self._parameters)
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        torch_split.stage_backward_weight(iter(self._parameters), kept.groups, retain_graph=True)
        found = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient
        return found

    def _add(
        self, parameters: Sequence[Parameter], groups: list[dict[str, Any]], gradients: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of some parameters: those of groups, and those that are given."""
        fresh = {parameter for parameter in parameters if parameter.grad is None}
        if groups:
            # Groups can share nodes, so the graph is retained; it is freed with `Kept`.
            torch_split.stage_backward_weight(iter(parameters), groups, retain_graph=True)
        for parameter, gradient in zip(parameters, gradients, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for parameter in parameters:
            if parameter in fresh and parameter.grad is not None:
                # Two weights that are summed share one gradient tensor. The next micro-batch would add to it twice.
                parameter.grad = parameter.grad.clone()
            if parameter.grad is not None:
                for hook in hooks_of(parameter):
                    hook(parameter)


def hooks_of(parameter: Parameter) -> list[Any]:
    """What `register_post_accumulate_grad_hook` has registered; autograd calls them where it adds to `grad` itself."""
    return [*(parameter._post_accumulate_grad_hooks or {}).values()]


def _reaches_all(roots: Sequence[Tensor], leaves: Sequence[Tensor], parameters: Sequence[Parameter]) -> bool:
    """Whether the split finds every parameter that the roots depend on, once, in whatever order it visits nodes.

    It visits them in the order of their addresses. Parameters whose gradients start at the same nodes come to one
    group; if some of these nodes differ, the groups depend on that order, and a parameter can come to two.
    """

    def nodes(tensors: Sequence[Tensor]) -> list[Any]:
        return [torch_split._get_grad_fn_or_grad_acc(tensor) for tensor in tensors]

    inputs, reverse = nodes(leaves), torch_split.construct_reverse_graph(nodes(roots))
    starts: dict[Any, frozenset[Any]] = {}
    for weight in nodes(parameters):
        if not reverse.get(weight):
            continue
        groups = torch_split.get_param_groups(inputs, [weight], reverse)
        if not groups:
            return False
        own = frozenset(groups[0]["intermediates"])
        if any(starts.setdefault(node, own) != own for node in own):
            return False
    return True


def _sort(group: dict[str, Any]) -> None:
    """Sort the nodes of a group, which are in order of addresses, by their creation order in the forward.

    The order of three or more terms of a gradient changes its last bits.
    """
    nodes = group["intermediates"]
    if len(nodes) > 1:
        order = sorted(range(len(nodes)), key=lambda number: -nodes[number]._sequence_nr())
        group["intermediates"] = [nodes[number] for number in order]
        group["grads"] = [group["grads"][number] for number in order]


def _as_one_root(roots: list[Tensor], given: list[Tensor]) -> Tensor:
    """A scalar whose backward with gradient 1 passes its given gradient to each root."""
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
