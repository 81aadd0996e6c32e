"""`RankIndex`: the index of one rank's part of a batch, split from that of the global batch. No second sort.

    index.order (row by row) ──rank of the occurrence's example──> one subsequence per rank, still row by row
    a change of row in it ───> the rank's unique rows, its CSR

A rank numbers occurrences in the order of its own sub-batch. This keeps the order of the global numbers, so numbers
that ascend in the global CSR ascend in the rank's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.index import BatchIndex
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch

__all__ = ["RankIndex", "busiest_ranks", "split_index"]

#: Up to so many ranks, a scan of the occurrences for each costs no more than their sort.
_FEW_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankIndex:
    """Index of one rank's part of a batch. Without examples or ids the arrays are empty.

    Attributes:
        examples: int32, ascending numbers of its examples.
        rows: int32 ``[U]``, its unique rows: ascending positions among the unique rows of the global batch.
        offsets, order: as in `ConsumerPlan`.
    """

    examples: NDArray[np.int32]
    rows: NDArray[np.int32]
    offsets: NDArray[np.int32]
    order: NDArray[np.int32]


def split_index(
    batch: Batch, spec: OracleSpec, index: BatchIndex, rank_of_example: NDArray[np.uint16]
) -> tuple[RankIndex, ...]:
    """Split the index of a batch over the ranks. Linear in occurrences: a radix sort, or for few ranks a scan for each.

    Args:
        index: the index of the whole batch.
        rank_of_example: uint16 ``[num_examples]``, below `spec.world_size`.
    """
    ranks = rank_of_example.astype(np.uint8) if spec.world_size <= 1 << 8 else rank_of_example
    sizes = np.bincount(ranks, minlength=spec.world_size)
    rank_of_occurrence, local_numbers = _number_occurrences(batch, spec, ranks, sizes)
    # Row by row. (numpy gathers by int64; it converts other indices each time.)
    by_row = index.order.astype(np.int64)
    rows = np.arange(len(index.unique), dtype=np.int32).repeat(np.diff(index.offsets))
    numbers = local_numbers.take(by_row)
    ranks_by_row = rank_of_occurrence.take(by_row)
    by_rank = np.argsort(ranks, kind="stable").astype(np.int32)
    examples = [by_rank[start:stop] for start, stop in itertools.pairwise([0, *np.cumsum(sizes).tolist()])]
    if spec.world_size > _FEW_RANKS:
        return _sorted_indexes(examples, ranks_by_row, rows, numbers)
    return tuple(
        _rank_index(np.flatnonzero(ranks_by_row == rank), own, rows, numbers) for rank, own in enumerate(examples)
    )


def busiest_ranks(rank_indexes: Sequence[RankIndex], num_rows: int) -> NDArray[np.uint16]:
    """uint16 ``[num_rows]``: the rank with most occurrences of each unique row; ties go to the lowest."""
    most = np.zeros(num_rows, dtype=np.int32)
    busiest = np.zeros(num_rows, dtype=np.uint16)
    for rank, rank_index in enumerate(rank_indexes):
        counts = np.diff(rank_index.offsets)
        more = np.flatnonzero(counts > most.take(rank_index.rows))
        most[rank_index.rows[more]] = counts[more]
        busiest[rank_index.rows[more]] = rank
    return busiest


def _rank_index(
    mine: NDArray[np.int64], examples: NDArray[np.int32], rows: NDArray[np.int32], numbers: NDArray[np.int32]
) -> RankIndex:
    """One rank's index, from the positions of its occurrences in the row-by-row arrays."""
    rows, order = rows.take(mine), numbers.take(mine)
    is_first = np.ones(mine.shape[0], dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    offsets = np.empty(starts.shape[0] + 1, dtype=np.int32)
    offsets[:-1] = starts
    offsets[-1] = mine.shape[0]
    return RankIndex(examples=examples, rows=rows.take(starts), offsets=offsets, order=order)


def _sorted_indexes(
    examples: Sequence[NDArray[np.int32]],
    ranks: NDArray[np.unsignedinteger],
    rows: NDArray[np.int32],
    numbers: NDArray[np.int32],
) -> tuple[RankIndex, ...]:
    """The indexes of all ranks, from the row-by-row arrays. A stable sort of 8 or 16 bits is a radix sort."""
    by_rank = np.argsort(ranks, kind="stable")
    rows, order = rows.take(by_rank), numbers.take(by_rank)
    ends = np.zeros(len(examples) + 1, dtype=np.int64)
    np.cumsum(np.bincount(ranks, minlength=len(examples)), out=ends[1:])
    is_first = np.ones(rows.shape[0], dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    is_first[ends[ends < rows.shape[0]]] = True
    starts = np.flatnonzero(is_first)
    unique, row_ends = rows.take(starts), starts.searchsorted(ends)
    spans = zip(itertools.pairwise(row_ends.tolist()), itertools.pairwise(ends.tolist()), strict=True)
    return tuple(
        RankIndex(
            examples=own,
            rows=unique[first:stop],
            offsets=np.append(starts[first:stop] - start, end - start).astype(np.int32),
            order=order[start:end],
        )
        for own, ((first, stop), (start, end)) in zip(examples, spans, strict=True)
    )


def _number_occurrences(
    batch: Batch, spec: OracleSpec, ranks: NDArray[np.unsignedinteger], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int32]]:
    """By occurrence: the rank of its example, and its number in that rank's own sub-batch."""
    if batch.is_one_hot:
        number_in_rank = _running_numbers(ranks, sizes)
        segments = np.arange(len(spec.features), dtype=np.int32)
        numbers = segments[:, None] * sizes.astype(np.int32).take(ranks) + number_in_rank
        return np.tile(ranks, len(spec.features)), numbers.reshape(-1)
    parts = [np.repeat(ranks, batch.lengths[ref.feature]) for ref in spec.features]
    rank_of_occurrence = np.concatenate([ranks[:0], *parts])
    counts = np.bincount(rank_of_occurrence, minlength=spec.world_size)
    return rank_of_occurrence, _running_numbers(rank_of_occurrence, counts)


def _running_numbers(ranks: NDArray[np.unsignedinteger], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32: the number of earlier entries of the same rank."""
    starts = np.cumsum(counts) - counts
    numbers = np.empty(ranks.shape[0], dtype=np.int32)
    numbers[np.argsort(ranks, kind="stable")] = np.arange(ranks.shape[0]) - np.repeat(starts, counts)
    return numbers
