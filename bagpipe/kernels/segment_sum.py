"""Sums of gradients, row by row, in a fixed order: the plan's numbers, on the host and as tensors.

    gradient[u] = sum(factors[p] * vectors[sources[p]] for p in range(row_starts[u], row_starts[u + 1]))

`vectors` are a rank's bags, for the rows it uses; or what all ranks sent, rank by rank, for the rows it owns.

A device with thousands of lanes sums a row's terms in one of them, so a row that the whole batch uses would hold all
others up. `HostSegmentSum.split` cuts such *long* rows into chunks of at most `max_terms` terms:

    terms ──chunks──> partial sums ──chunks of those──> … ──at most max_terms of them──> gradient of the long row

Rule of this file: chunks are cut by a term's position in its row, so a row's result depends on its own terms and on
`max_terms`, and on nothing else: not on the other rows of the batch, nor on where the row stands among them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MAX_TERMS", "Chunks", "HostChunks", "HostLongRows", "HostSegmentSum", "Int32", "LongRows", "SegmentSum"]

Int32 = NDArray[np.int32]

#: Terms that one lane of a GPU walks through at most. Each few of them cost a trip to memory, about as long as a launch
#: takes: with 32 a walk takes the time of two or three launches, and a row with 16,384 terms, or 32,768, two levels of
#: chunks. The order of sums follows from it, so results on a GPU change with it.
MAX_TERMS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostChunks:
    """`Chunks` before they are tensors."""

    starts: Int32
    ends: Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLongRows:
    """`LongRows` before they are tensors."""

    rows: NDArray[np.int64]
    levels: tuple[HostChunks, ...]
    offsets: Int32
    num_terms: int
    max_terms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSegmentSum:
    """`SegmentSum` before they are tensors; k rows, n terms.

    Attributes:
        row_starts: int32 ``[k + 1]``, where each row's terms start.
        sources: int32 ``[n]``, vector of each term.
        coefficients: ``[n]``, factor of each term (mean: 1 / bag length); None: all ones.
        occurrences: int32 ``[n]``, occurrence (as in the plan) of each term; weighted groups only.
    """

    row_starts: Int32
    sources: Int32
    coefficients: NDArray[np.float64] | None = None
    occurrences: Int32 | None = None
    long: HostLongRows | None = None

    def select(self, rows: NDArray[np.int64]) -> HostSegmentSum:
        """The sums of these rows, in this order; not split."""
        lengths = np.diff(self.row_starts)[rows]
        row_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=row_starts[1:])
        terms = np.repeat(self.row_starts[rows] - row_starts[:-1], lengths)
        terms += np.arange(len(terms), dtype=np.int32)
        return HostSegmentSum(
            row_starts=row_starts,
            sources=self.sources[terms],
            coefficients=None if self.coefficients is None else self.coefficients[terms],
            occurrences=None if self.occurrences is None else self.occurrences[terms],
        )

    def split(self, max_terms: int | None) -> HostSegmentSum:
        """The same sums with rows of more than `max_terms` terms cut into chunks; None: nothing is cut.

        The arrays of terms are shared, not copied: chunks are ranges of them.
        """
        if max_terms is None:
            return self
        lengths = np.diff(self.row_starts)
        rows = np.flatnonzero(lengths > max_terms)
        if not len(rows):
            return self
        starts, counts = self.row_starts[rows], lengths[rows]
        num_terms = int(counts.sum())
        levels = []
        while int(counts.max()) > max_terms:
            num_chunks = -(-counts // np.int32(max_terms))
            levels.append(_cut(starts, counts, num_chunks, max_terms))
            counts = num_chunks
            starts = (np.cumsum(counts) - counts).astype(np.int32)
        offsets = np.append(starts, starts[-1] + counts[-1]).astype(np.int32)
        long = HostLongRows(rows=rows, levels=tuple(levels), offsets=offsets, num_terms=num_terms, max_terms=max_terms)
        return dataclasses.replace(self, long=long)


def _cut(starts: Int32, counts: Int32, num_chunks: Int32, max_terms: int) -> HostChunks:
    """Ranges of at most `max_terms`, row after row."""
    first_chunk = np.cumsum(num_chunks) - num_chunks
    chunk_starts = np.repeat((starts - first_chunk * max_terms).astype(np.int32), num_chunks)
    chunk_starts += np.arange(0, len(chunk_starts) * max_terms, max_terms, dtype=np.int32)
    chunk_ends = np.minimum(chunk_starts + np.int32(max_terms), np.repeat(starts + counts, num_chunks))
    return HostChunks(starts=chunk_starts, ends=chunk_ends.astype(np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Ranges of terms, or of the partial sums before, each of which makes one partial sum; c of them.

    Attributes:
        starts, ends: int32 ``[c]``.
    """

    starts: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LongRows:
    """The rows that are summed in chunks; m of them.

    Attributes:
        rows: int64 ``[m]``, which.
        levels: chunks of their terms, then chunks of the partial sums of the level before; at least one level.
        offsets: int32 ``[m + 1]``, where each row's partial sums of the last level start; they are side by side.
        num_terms: terms of these rows together.
        max_terms: no chunk has more, nor any other row; these rows have.
    """

    rows: Tensor
    levels: tuple[Chunks, ...]
    offsets: Tensor
    num_terms: int
    max_terms: int

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentSum:
    """Which vectors are summed for each row: `HostSegmentSum` on the device.

    Attributes:
        row_starts: int32 ``[k + 1]``, on the host.
        row_offsets: int32 ``[k + 1]``, the same on the device.
        sources: int32 ``[n]``.
        coefficients: ``[n]`` in the job's dtype, or None.
        occurrences: int32 ``[n]``, or None.
        long: rows that are summed in chunks; None: each is summed from its first term to its last.
    """

    row_starts: Int32
    row_offsets: Tensor
    sources: Tensor
    coefficients: Tensor | None
    occurrences: Tensor | None
    long: LongRows | None = None

    def __len__(self) -> int:
        return len(self.row_starts) - 1
