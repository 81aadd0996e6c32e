"""Forward and backward of a table group: rows to pooled vectors, and gradients of the vectors back to rows.

    forward    vectors[g]  = sum over occurrences p of bag g:  c[p] * weights[inverse[p]]
    backward   gradient[u] = sum over occurrences p of row u:  c[p] * grad_vectors[bag of p]   (c = 1, 1/len, weight)

Both are the same operation with bags and rows exchanged. Kernels add each sum from its first to its last term, in plan
order: no sort, no atomics, and no dependence on threads, slots or cache size. Autograd only delivers the gradient of
the vectors; the segment sum runs once per batch, in the row update.

A lookup of other ids than the planned ones has a context of its own (`bagpipe.cache.derived_lookup`): other bags, the
same rows. The gradient of a row is the sum over all lookups, in the order in which backward reaches them. A row that
none of them has is not updated (`touched_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, GroupContext
from bagpipe.errors import JobError
from bagpipe.kernels.interface import Bags, Gradients, Kernels, RowView
from bagpipe.kernels.segment_sum import SegmentSum

__all__ = ["ActiveBatch", "ActiveTableGroup", "LookupGradient", "gradients_of", "lookup", "touched_rows"]


class LookupGradient(NamedTuple):
    """What backward delivers for one lookup of a table group.

    Attributes:
        vectors: ``[G, dim]``, gradient of its vectors.
        weights: ``[n]``, its per-id weights; None: unweighted.
        sums: by part of the backward, the segment sums to the rows. Empty: a planned lookup of a micro-batch, whose
            sums are those of the whole batch.
        rows: int32 ``[m]``, rows that it has, in the order of lookups; None: those with terms in `sums`.
    """

    vectors: Tensor
    weights: Tensor | None
    sums: tuple[SegmentSum, ...]
    rows: Tensor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveTableGroup:
    """A table group of the batch being computed.

    Attributes:
        context: index tensors.
        rows: the unique rows, as of the begin of the batch.
        dtype: dtype of vectors and gradients; that of the rows can be narrower.
        kernels: kernels that read the rows.
        gradients: results of backward, one entry per lookup of the group.
        closed: the rows are updated; later gradients are errors.
    """

    context: GroupContext
    rows: RowView
    dtype: torch.dtype
    kernels: Kernels
    gradients: list[LookupGradient] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveBatch:
    """The batch being computed. Embedding modules read it.

    Attributes:
        context: index tensors.
        groups: its table groups.
        versions: `BatchContext.versions` before the model's forward.
    """

    context: BatchContext
    groups: tuple[ActiveTableGroup, ...]
    versions: tuple[int, int]

    def close(self) -> tuple[ActiveTableGroup, ...]:
        """End the batch after its backward; returns its groups, with their gradients."""
        for group in self.groups:
            group.closed = True
        return self.groups


def lookup(group: ActiveTableGroup, weights: Tensor | None = None, context: GroupContext | None = None) -> Tensor:
    """Look up the vectors of a group, differentiably in its rows, unless they are frozen, and in `weights`.

    Args:
        group: the active group.
        weights: ``[n]`` per-id weights, in the order of the ids, segment after segment; weighted groups only.
        context: of a derived lookup; None: of the planned one.

    Returns:
        ``[num_examples, num_segments * dim]``, or ``[n, dim]`` without pooling.
    """
    # Autograd calls backward only if an input requires a gradient. Rows are not parameters, so the anchor does.
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and not group.context.tables.is_frozen)
    context = group.context if context is None else context
    vectors: Tensor = _Lookup.apply(anchor, group, context, weights)  # type: ignore[no-untyped-call]
    return vectors


def gradients_of(group: ActiveTableGroup, part: int) -> list[Gradients]:
    """Gradients of one part of the group's backward; empty if backward did not reach the group."""
    return [
        Gradients(vectors=each.vectors, segment_sum=each.sums[part], weights=each.weights) for each in group.gradients
    ]


def touched_rows(group: ActiveTableGroup) -> NDArray[np.bool_] | None:
    """bool ``[U]``, in plan order: the rows that a lookup with a gradient has, also if that is zero; None: all.

    On the host; a device is waited for only if some micro-batches of a batch looked up nothing.
    """
    context = group.context
    if any(each.sums is context.backward and each.rows is None for each in group.gradients):
        return None  # a planned lookup has all rows
    planned = context.planned
    touched = np.zeros(context.num_rows, np.bool_)
    for each in group.gradients:
        if each.rows is not None:
            found = np.zeros(context.num_rows, np.bool_)
            found[each.rows.cpu().numpy()] = True
            touched |= found if planned.arrival is None else found[planned.arrival]
            continue
        for rows, sums in zip(planned.pushed, each.sums, strict=True):
            has_terms = np.diff(sums.row_starts) > 0
            touched[slice(None) if rows is None else rows] |= has_terms
    return None if touched.all() else touched


def _forward(group: ActiveTableGroup, context: GroupContext, weights: Tensor | None) -> Tensor:
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


def _weights_gradient(group: ActiveTableGroup, context: GroupContext, gradient: Tensor) -> Tensor:
    """``[n]``: gradient of the per-id weights: dot product of each id's row with the gradient of its bag."""
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
    def forward(
        ctx: Any, anchor: Tensor, group: ActiveTableGroup, context: GroupContext, weights: Tensor | None
    ) -> Tensor:
        ctx.group, ctx.context = group, context
        ctx.save_for_backward(weights)
        return _forward(group, context, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor | None]:
        group: ActiveTableGroup = ctx.group
        context: GroupContext = ctx.context
        if group.closed:
            raise JobError("backward ran after the rows of its batch were updated")
        (weights,) = ctx.saved_tensors
        # Kept by reference and never written: other nodes of the graph can share it.
        vectors = gradient.contiguous().view(-1, group.context.tables.dim)
        if not group.context.tables.is_frozen:
            group.gradients.append(
                LookupGradient(vectors, None if weights is None else weights.detach(), context.backward)
            )
        if weights is not None and ctx.needs_input_grad[3]:
            return None, None, None, _weights_gradient(group, context, vectors)
        return None, None, None, None
