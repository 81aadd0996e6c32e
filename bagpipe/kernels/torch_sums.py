"""Segment sums in torch operations: the terms of a row in sequence, or in chunks for long rows.

    SegmentSum ──rows that are not long──> embedding_bag ──────────────────────────────────────> gradients
            └─long rows──> chunks ─embedding_bag─> partial sums ─embedding_bag─> … ─index_copy─┘

`torch.embedding_bag` adds each bag from its first to its last term, on a CPU in one thread and on CUDA in one thread
per column: no sort, no atomics, one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bagpipe.kernels.interface import Gradients
from bagpipe.kernels.segment_sum import LongRows, SegmentSum

__all__ = ["add_in_order", "sum_block", "sum_rows", "sum_segments", "total_gradient"]

_MODE_NUMBER = {False: 0, True: 1}  # torch.embedding_bag's own numbers: sum, mean


def total_gradient(gradients: Sequence[Gradients], first: int = 0, end: int | None = None) -> Tensor:
    """``[end - first, dim]``: gradients of rows `first` to `end` (default: all); contributions are added in order.

    Rows are summed independently, so blocks of rows give the same bits. Sums with long rows need all rows in one call.
    """
    return add_in_order(_gradient(contribution, first, end) for contribution in gradients)


def _gradient(contribution: Gradients, first: int, end: int | None) -> Tensor:
    """The contribution of one lookup, in new memory."""
    if end is None or (first == 0 and end == len(contribution.segment_sum)):
        return sum_rows(contribution.vectors, contribution.segment_sum, contribution.weights)
    assert contribution.segment_sum.long is None, "sums with long rows need all rows in one call"
    return sum_block(contribution.vectors, contribution.segment_sum, first, end, contribution.weights)


def add_in_order(sums: Iterable[Tensor]) -> Tensor:
    """Add all tensors to the first, in order; at least one. Overwrites the first."""
    remaining = iter(sums)
    total = next(remaining)
    for other in remaining:
        total.add_(other)
    return total


def sum_rows(vectors: Tensor, segment_sum: SegmentSum, weights: Tensor | None = None) -> Tensor:
    """``[k, dim]``: the sums of all rows, long rows in chunks.

    Args:
        vectors: ``[num_vectors, dim]``.
        segment_sum: the index arrays.
        weights: per-id weights in plan order, which replace the coefficients; weighted groups only.
    """
    long = segment_sum.long
    if long is None:
        return sum_block(vectors, segment_sum, 0, len(segment_sum), weights)
    factors = _factors(segment_sum, slice(None), weights)
    starts, ends = segment_sum.row_offsets[:-1], segment_sum.row_offsets[1:]
    lengths = ends - starts
    lengths = torch.where(lengths > long.max_terms, 0, lengths)
    num_short = len(segment_sum.sources) - long.num_terms
    out = _sum_ranges(vectors, segment_sum.sources, factors, starts, lengths, num_short)
    return out.index_copy_(0, long.rows, _sum_chunks(vectors, segment_sum, factors, long))


def _sum_chunks(vectors: Tensor, segment_sum: SegmentSum, factors: Tensor | None, long: LongRows) -> Tensor:
    """``[m, dim]``: the sums of the long rows."""
    terms, *above = long.levels
    partial = _sum_ranges(
        vectors, segment_sum.sources, factors, terms.starts, terms.ends - terms.starts, long.num_terms
    )
    for level in above:
        partial = sum_segments(partial, _all_of(partial), torch.cat([level.starts, level.ends[-1:]]))
    return sum_segments(partial, _all_of(partial), long.offsets)


def _all_of(vectors: Tensor) -> Tensor:
    return torch.arange(len(vectors), dtype=torch.int32, device=vectors.device)


def _sum_ranges(
    vectors: Tensor, sources: Tensor, factors: Tensor | None, starts: Tensor, lengths: Tensor, num_terms: int
) -> Tensor:
    """Sums of the terms ``[starts, starts + lengths)``, `num_terms` in total: made contiguous, then summed."""
    offsets = torch.zeros(len(starts) + 1, dtype=torch.int32, device=starts.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    # The host knows the number of terms, so `repeat_interleave` does not wait for the device.
    terms = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=num_terms)
    terms += torch.arange(num_terms, dtype=torch.int32, device=starts.device)
    picked = None if factors is None else factors.index_select(0, terms)
    return sum_segments(vectors, sources.index_select(0, terms), offsets, picked)


def sum_block(vectors: Tensor, segment_sum: SegmentSum, first: int, end: int, weights: Tensor | None = None) -> Tensor:
    """``[end - first, dim]``: the sums of rows `first` to `end`, each from its first to its last term."""
    start, stop = int(segment_sum.row_starts[first]), int(segment_sum.row_starts[end])
    offsets = segment_sum.row_offsets[first : end + 1]
    if start:
        offsets = offsets - start
    factors = _factors(segment_sum, slice(start, stop), weights)
    return sum_segments(vectors, segment_sum.sources[start:stop], offsets, factors)


def _factors(segment_sum: SegmentSum, terms: slice, weights: Tensor | None) -> Tensor | None:
    if weights is not None and segment_sum.occurrences is not None:
        return weights.index_select(0, segment_sum.occurrences[terms])
    return None if segment_sum.coefficients is None else segment_sum.coefficients[terms]


def sum_segments(
    vectors: Tensor, sources: Tensor, offsets: Tensor, factors: Tensor | None = None, *, mean: bool = False
) -> Tensor:
    """``out[i] = sum(factors[p] * vectors[sources[p]] for p in range(offsets[i], offsets[i + 1]))``, in that order."""
    return torch.embedding_bag(
        vectors, sources, offsets, False, _MODE_NUMBER[mean], False, factors, include_last_offset=True
    )[0]
