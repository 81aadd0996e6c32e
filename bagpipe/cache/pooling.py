"""`PoolingArrays`: index arrays that depend on the bags of a lookup, on the host.

    rows of occurrences in plan order, segment after segment ──pooling_arrays──> the same, bag by bag; bag of each term

Bags are numbered example-major (`bagpipe.cache.batch_context`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.lookup_layout import TableGroup
from bagpipe.kernels.segment_sum import Int32

__all__ = ["PoolingArrays", "pooling_arrays"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingArrays:
    """Host arrays of `GroupContext` and of its segment sum.

    Attributes:
        inverse, bag_offsets, bag_order, bags: see `GroupContext`.
        sources: int32 ``[n]``, gradient row of each term, in the order of the terms.
        coefficients: ``[n]``, factor of each term; None: ones.
    """

    inverse: Int32
    sources: Int32
    bag_offsets: Int32 | None = None
    coefficients: NDArray[np.float64] | None = None
    bag_order: Int32 | None = None
    bags: Int32 | None = None


def pooling_arrays(group: TableGroup, lengths: Int32, inverse: Int32, order: Int32) -> PoolingArrays:
    """The arrays of one lookup of a table group.

    Args:
        group: the table group.
        lengths: int32 ``[segments of the group, examples]``, ids per bag.
        inverse: int32 ``[n]``, row of each occurrence in plan order: segment after segment.
        order: int32, occurrences in the order of the terms of a segment sum.
    """
    if group.lookup.pooling == "none":
        return PoolingArrays(inverse=inverse, sources=order)
    num_segments, num_examples = lengths.shape
    num_bags = num_segments * num_examples
    bag_numbers = np.arange(num_bags, dtype=np.int32).reshape(num_examples, num_segments).T  # [segment, example]
    one_hot = len(inverse) == num_bags and bool((lengths == 1).all())
    if one_hot:
        # Occurrence p belongs to segment p // num_examples and example p % num_examples: a plain transposition.
        bag_of = np.ascontiguousarray(bag_numbers).reshape(-1)
        permuted = np.ascontiguousarray(inverse.reshape(num_segments, num_examples).T).reshape(-1)
        bag_offsets = bag_order = bags = None
        if group.lookup.weighted:
            bags = np.arange(num_bags, dtype=np.int32)
            bag_offsets = np.arange(num_bags + 1, dtype=np.int32)
            bag_order = np.arange(num_bags, dtype=np.int32).reshape(num_segments, num_examples).T.reshape(-1)
        return PoolingArrays(
            inverse=permuted, sources=bag_of[order], bag_offsets=bag_offsets, bag_order=bag_order, bags=bags
        )
    return _multi_hot(group, lengths, bag_numbers, inverse, order)


def _multi_hot(group: TableGroup, lengths: Int32, bag_numbers: Int32, inverse: Int32, order: Int32) -> PoolingArrays:
    """Permute bags of any length from segment-major to example-major order."""
    segment_lengths = lengths.reshape(-1)
    bag_of = np.repeat(bag_numbers.reshape(-1), segment_lengths)
    starts = np.zeros(len(segment_lengths) + 1, dtype=np.int32)
    np.cumsum(segment_lengths, out=starts[1:])
    bag_lengths = np.ascontiguousarray(lengths.T).reshape(-1)
    bag_offsets = np.zeros(len(bag_lengths) + 1, dtype=np.int32)
    np.cumsum(bag_lengths, out=bag_offsets[1:])
    # Entry i of the permuted order is occurrence i - bag_offsets[bag] of its bag.
    shifts = starts[:-1].reshape(lengths.shape).T.reshape(-1) - bag_offsets[:-1]
    bag_order = np.repeat(shifts, bag_lengths)
    bag_order += np.arange(len(inverse), dtype=np.int32)
    coefficients = None
    if group.lookup.pooling == "mean":
        with np.errstate(divide="ignore"):  # no occurrence uses the coefficient of an empty bag
            coefficients = np.repeat(1.0 / segment_lengths, segment_lengths)[order]
    weighted = group.lookup.weighted
    return PoolingArrays(
        inverse=inverse[bag_order],
        sources=bag_of[order],
        bag_offsets=bag_offsets,
        coefficients=coefficients,
        bag_order=bag_order if weighted else None,
        bags=np.repeat(np.arange(len(bag_lengths), dtype=np.int32), bag_lengths) if weighted else None,
    )
