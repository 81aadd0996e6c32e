"""Lookups of a batch in parts, one micro-batch at a time; one update of its rows.

    ActiveBatch ──active_parts──> one per micro-batch: the same rows, its own bags ──forward, backward──> gradients
                <──join_gradients── as if one backward had reached all examples

Rule of this file: *a row's gradient is one segment sum over the whole batch*, so how a batch is divided changes no
order of terms. Derived lookups have sums of their own, which come after it, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bagpipe.cache.batch_context import GroupContext, Span
from bagpipe.cache.lookup import ActiveBatch, ActiveTableGroup, LookupGradient

__all__ = ["active_parts", "join_gradients"]


def active_parts(batch: ActiveBatch) -> tuple[ActiveBatch, ...]:
    """The micro-batches of a batch that has begun."""
    return tuple(
        ActiveBatch(
            context=part.context,
            groups=tuple(
                ActiveTableGroup(context=context, rows=group.rows, dtype=group.dtype, kernels=group.kernels)
                for context, group in zip(part.context.groups, batch.groups, strict=True)
            ),
            versions=part.context.versions,
        )
        for part in batch.context.parts
    )


def join_gradients(batch: ActiveBatch, parts: Sequence[ActiveBatch]) -> None:
    """Give a batch the gradients of its micro-batches, which end.

    Args:
        batch: the batch.
        parts: what `active_parts` made of it, after their backwards. A part without gradients counts with zeros and
            touches no rows.
    """
    contexts = batch.context.parts
    for number, whole in enumerate(batch.groups):
        groups = [part.groups[number] for part in parts]
        rows = [context.gradient_rows[number] for context in contexts]
        occurrences = [context.occurrences[number] for context in contexts]
        planned = [[gradient for gradient in group.gradients if not gradient.sums] for group in groups]
        for lookup in range(max(map(len, planned), default=0)):
            given = [of_part[lookup] if lookup < len(of_part) else None for of_part in planned]
            vectors = _joined(rows, [None if gradient is None else gradient.vectors for gradient in given])
            weights = None
            if whole.context.tables.lookup.weighted:
                weights = _joined(occurrences, [None if gradient is None else gradient.weights for gradient in given])
            looked_up = _rows_of([context.context.groups[number] for context in contexts], given)
            whole.gradients.append(LookupGradient(vectors, weights, whole.context.backward, looked_up))
        for group in groups:
            whole.gradients.extend(gradient for gradient in group.gradients if gradient.sums)
            group.closed = True
            group.gradients.clear()


def _rows_of(contexts: Sequence[GroupContext], given: Sequence[LookupGradient | None]) -> Tensor | None:
    """int32 ``[m]``, rows of the micro-batches that have a gradient, at least one; None: all others have no ids."""
    pairs = list(zip(contexts, given, strict=True))
    if all(gradient is not None or not any(context.segment_sizes) for context, gradient in pairs):
        return None
    return torch.cat([context.inverse for context, gradient in pairs if gradient is not None])


def _joined(spans: Sequence[Sequence[Span]], parts: Sequence[Tensor | None]) -> Tensor:
    """The rows of all parts, each where its spans say; zeros where a part is missing. At least one is there."""
    like = next(part for part in parts if part is not None)
    num_rows = sum(end - start for own in spans for start, end in own)
    make = like.new_zeros if any(part is None for part in parts) else like.new_empty
    joined = make((num_rows, *like.shape[1:]))
    for own, part in zip(spans, parts, strict=True):
        if part is not None:
            sizes = [end - start for start, end in own]
            for (start, end), rows in zip(own, torch.split(part, sizes), strict=True):
                joined[start:end] = rows
    return joined
