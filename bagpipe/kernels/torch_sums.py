"""Sums of vectors with torch's own operations: a row's terms one after the other, or in pieces where the plan says so.

    SegmentSum ──rows that are not long──> embedding_bag ──────────────────────────────────────> gradients
            └─long rows──> pieces ─embedding_bag─> partial sums ─embedding_bag─> … ─index_copy─┘

`torch.embedding_bag` walks each bag from its first to its last term, on a CPU in one thread and on CUDA in one thread
per column: no sort, no atomics, one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bagpipe.kernels.interface import Gradients
from bagpipe.kernels.segment_sum import LongRows, SegmentSum

__all__ = ["add_in_order", "segment_sum", "sum_block", "sum_rows", "total_gradient"]

_MODE_NUMBER = {False: 0, True: 1}  # torch.embedding_bag's own numbers: sum, mean


def total_gradient(terms: Sequence[Gradients], first: int = 0, end: int | None = None) -> Tensor:
    """``[end - first, dim]``: of rows `first` to `end` (all, if not given), the lookups' sums, added in their order.

    Rows are summed one by one, so blocks of them give the bits of all at once; sums in pieces are made all at once.
    """
    return add_in_order(_gradient(term, first, end) for term in terms)


def _gradient(term: Gradients, first: int, end: int | None) -> Tensor:
    """Of one lookup; new memory."""
    if end is None or (first == 0 and end == len(term.sums)):
        return sum_rows(term.vectors, term.sums, term.weights)
    assert term.sums.long is None, "sums in pieces are made all at once"
    return sum_block(term.vectors, term.sums, first, end, term.weights)


def add_in_order(sums: Iterable[Tensor]) -> Tensor:
    """All added to the first, one after the other; at least one."""
    remaining = iter(sums)
    total = next(remaining)
    for other in remaining:
        total.add_(other)
    return total


def sum_rows(vectors: Tensor, sums: SegmentSum, weights: Tensor | None = None) -> Tensor:
    """``[k, dim]``: the sums of all rows, long ones in their pieces.

    Args:
        vectors: ``[num_vectors, dim]``.
        sums: what to sum.
        weights: per-id weights by occurrence (as in the plan), in the place of the coefficients; weighted groups only.
    """
    long = sums.long
    if long is None:
        return sum_block(vectors, sums, 0, len(sums), weights)
    factors = _factors(sums, slice(None), weights)
    starts, ends = sums.row_offsets[:-1], sums.row_offsets[1:]
    lengths = ends - starts
    lengths = torch.where(lengths > long.max_terms, 0, lengths)
    num_short = len(sums.sources) - long.num_terms
    out = _sum_ranges(vectors, sums.sources, factors, starts, lengths, num_short)
    return out.index_copy_(0, long.rows, _sum_pieces(vectors, sums, factors, long))


def _sum_pieces(vectors: Tensor, sums: SegmentSum, factors: Tensor | None, long: LongRows) -> Tensor:
    """``[m, dim]``: the long rows' sums."""
    terms, *above = long.levels
    partial = _sum_ranges(vectors, sums.sources, factors, terms.starts, terms.ends - terms.starts, long.num_terms)
    for level in above:
        partial = segment_sum(partial, _all_of(partial), torch.cat([level.starts, level.ends[-1:]]))
    return segment_sum(partial, _all_of(partial), long.offsets)


def _all_of(vectors: Tensor) -> Tensor:
    return torch.arange(len(vectors), dtype=torch.int32, device=vectors.device)


def _sum_ranges(
    vectors: Tensor, sources: Tensor, factors: Tensor | None, starts: Tensor, lengths: Tensor, num_terms: int
) -> Tensor:
    """Sums of the terms ``[starts, starts + lengths)``, `num_terms` together: gathered side by side, then summed."""
    offsets = torch.zeros(len(starts) + 1, dtype=torch.int32, device=starts.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    # The number of terms is known on the host: nothing waits for the device to count them.
    terms = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=num_terms)
    terms += torch.arange(num_terms, dtype=torch.int32, device=starts.device)
    picked = None if factors is None else factors.index_select(0, terms)
    return segment_sum(vectors, sources.index_select(0, terms), offsets, picked)


def sum_block(vectors: Tensor, sums: SegmentSum, first: int, end: int, weights: Tensor | None = None) -> Tensor:
    """``[end - first, dim]``: the sums of rows `first` to `end`, each from its first term to its last."""
    start, stop = int(sums.row_starts[first]), int(sums.row_starts[end])
    offsets = sums.row_offsets[first : end + 1]
    if start:
        offsets = offsets - start
    factors = _factors(sums, slice(start, stop), weights)
    return segment_sum(vectors, sums.sources[start:stop], offsets, factors)


def _factors(sums: SegmentSum, terms: slice, weights: Tensor | None) -> Tensor | None:
    if weights is not None and sums.occurrences is not None:
        return weights.index_select(0, sums.occurrences[terms])
    return None if sums.coefficients is None else sums.coefficients[terms]


def segment_sum(
    vectors: Tensor, sources: Tensor, offsets: Tensor, factors: Tensor | None = None, *, mean: bool = False
) -> Tensor:
    """``out[i] = sum(factors[p] * vectors[sources[p]] for p in range(offsets[i], offsets[i + 1]))``, in that order."""
    return torch.embedding_bag(
        vectors, sources, offsets, False, _MODE_NUMBER[mean], False, factors, include_last_offset=True
    )[0]
