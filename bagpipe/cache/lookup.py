"""Forward and backward of a table group: rows to pooled vectors, and gradients of the vectors back to rows.

    forward    vectors[g]  = sum over occurrences p of bag g:  c[p] * weights[inverse[p]]
    backward   gradient[u] = sum over occurrences p of row u:  c[p] * grad_vectors[bag of p]   (c = 1, 1/len, weight)

Both are the same operation with bags and rows exchanged. Kernels add each sum from its first to its last term, in plan
order: no sort, no atomics, and no dependence on threads, slots or cache size. Autograd only delivers the gradient of
the vectors; the segment sum runs once per batch, in the row update.
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
    """A table group of the batch being computed.

    Attributes:
        context: index tensors.
        rows: the unique rows, as of the begin of the batch.
        dtype: dtype of vectors and gradients; that of the rows can be narrower.
        kernels: kernels that read the rows.
        gradients: results of backward, one entry per lookup of the group: gradient of its vectors ``[G, dim]``, and the
            per-id weights of the lookup (None: unweighted).
        closed: the rows are updated; later gradients are errors.
    """

    context: GroupContext
    rows: RowView
    dtype: torch.dtype
    kernels: Kernels
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveBatch:
    """The batch being computed. Embedding modules read it."""

    context: BatchContext
    groups: tuple[ActiveTableGroup, ...]

    def close(self) -> tuple[ActiveTableGroup, ...]:
        """End the batch after its backward; returns its groups, with their gradients."""
        for group in self.groups:
            group.closed = True
        return self.groups


def lookup(group: ActiveTableGroup, weights: Tensor | None = None) -> Tensor:
    """Look up the vectors of a group, differentiably in its rows, unless they are frozen, and in `weights`.

    Args:
        group: the active group.
        weights: ``[n]`` per-id weights, in plan order; weighted groups only.

    Returns:
        ``[num_examples, num_segments * dim]``, or ``[n, dim]`` without pooling.
    """
    # Autograd calls backward only if an input requires a gradient. Rows are not parameters, so the anchor does.
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and not group.context.tables.is_frozen)
    vectors: Tensor = _Lookup.apply(anchor, group, weights)  # type: ignore[no-untyped-call]
    return vectors


def gradients_of(group: ActiveTableGroup, part: int) -> list[Gradients]:
    """Gradients of one part of the group's backward; empty if backward did not reach the group."""
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
    """``[n]``: gradient of the per-id weights: dot product of each id's row with the gradient of its bag."""
    context = group.context
    rows = group.rows.gathered().index_select(0, context.inverse).to(group.dtype)
    per_bag_order = rows.mul_(gradient.index_select(0, _present(context.bags))).sum(1)
    out = torch.empty_like(per_bag_order)
    return out.index_copy_(0, _present(context.bag_order).long(), per_bag_order)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise JobError("expected a lookup without per-id weights, as planned, got weights")
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
            raise JobError("backward ran after the rows of its batch were updated")
        (weights,) = ctx.saved_tensors
        # Kept by reference and never written: other nodes of the graph can share it.
        vectors = gradient.contiguous().view(-1, group.context.tables.dim)
        if not group.context.tables.is_frozen:
            group.gradients.append((vectors, None if weights is None else weights.detach()))
        if weights is not None and ctx.needs_input_grad[2]:
            return None, None, _weights_gradient(group, vectors)
        return None, None, None
