"""Forward and backward of one group: unique rows to pooled vectors, and pooled gradients back to unique rows.

    forward    vectors[g]  = sum over occurrences p of bag g:  c[p] * weights[inverse[p]]
    backward   gradient[u] = sum over occurrences p of row u:  c[p] * grad_vectors[bag of p]   (c = 1, 1/len, weight)

Both are the same operation with the roles of bags and rows exchanged: the kernels walk each sum from its first
to its last term, in the order the plan gives. So nothing is sorted, nothing is added atomically, and the result does
not depend on threads, slots or cache size. Autograd only delivers the gradient of the vectors here; the segment sum
runs once per batch, when the rows are updated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, GroupContext
from bagpipe.errors import JobError
from bagpipe.kernels.interface import Bags, Gradients, Kernels, RowView

__all__ = ["ActiveBatch", "ActiveTableGroup", "gradients_of", "lookup"]


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveTableGroup:
    """One group of the batch being computed.

    Attributes:
        context: index tensors.
        rows: the unique rows, as they were when the batch began.
        dtype: of the vectors and their gradients; the rows' own may be narrower.
        kernels: what reads them.
        gradients: what backward delivered, one entry per lookup of the group: gradient of its vectors ``[G, dim]``, and
            the per-id weights it was looked up with (None: the group has none).
        closed: the rows were updated, so nothing may arrive any more.
    """

    context: GroupContext
    rows: RowView
    dtype: torch.dtype
    kernels: Kernels
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveBatch:
    """The batch being computed: what the embedding modules read."""

    context: BatchContext
    groups: tuple[ActiveTableGroup, ...]


def lookup(group: ActiveTableGroup, weights: Tensor | None = None) -> Tensor:
    """Vectors of a group, differentiable: the gradient goes to the group, and to `weights` if they want one.

    Args:
        group: the active group.
        weights: ``[n]`` per-id weights, occurrences numbered as in the plan; weighted groups only.

    Returns:
        ``[num_examples, num_segments * dim]``, or ``[n, dim]`` without pooling.
    """
    # Autograd calls backward only where an input wants a gradient. Rows are not parameters: the anchor wants one.
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
    vectors: Tensor = _Lookup.apply(anchor, group, weights)  # type: ignore[no-untyped-call]
    return vectors


def gradients_of(group: ActiveTableGroup, part: int) -> list[Gradients]:
    """What the rows of a part of the group's backward are updated by; empty: backward never reached the group."""
    segment_sum = group.context.backward[part]
    return [
        Gradients(vectors=vectors, segment_sum=segment_sum, weights=weights) for vectors, weights in group.gradients
    ]


def _forward(group: ActiveTableGroup, weights: Tensor | None) -> Tensor:
    context = group.context
    bags = Bags(
        indices=context.inverse,
        offsets=context.bag_offsets,
        factors=None if weights is None else weights.index_select(0, _present(context.bag_order)),
        mean=context.tables.lookup.pooling == "mean",
    )
    vectors = group.kernels.pool(group.rows, bags)
    if context.tables.lookup.pooling == "none":
        return vectors
    return vectors.view(-1, context.tables.num_segments * context.tables.dim)


def _weights_gradient(group: ActiveTableGroup, gradient: Tensor) -> Tensor:
    """``[n]``: gradient of the per-id weights, the product of each id's row with the gradient of its bag."""
    context = group.context
    rows = group.rows.gathered().index_select(0, context.inverse).to(group.dtype)
    per_bag_order = rows.mul_(gradient.index_select(0, _present(context.bags))).sum(1)
    out = torch.empty_like(per_bag_order)
    return out.index_copy_(0, _present(context.bag_order).long(), per_bag_order)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise JobError("a group planned without per-id weights was looked up with weights")
    return tensor


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, group: ActiveTableGroup, weights: Tensor | None) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(weights)
        return _forward(group, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None]:
        group: ActiveTableGroup = ctx.group
        if group.closed:
            raise JobError("backward came after the batch's rows were updated")
        (weights,) = ctx.saved_tensors
        # Kept by reference, never written: it may be shared with other nodes of the graph.
        vectors = gradient.contiguous().view(-1, group.context.tables.dim)
        group.gradients.append((vectors, None if weights is None else weights.detach()))
        if weights is not None and ctx.needs_input_grad[2]:
            return None, None, _weights_gradient(group, vectors)
        return None, None, None
