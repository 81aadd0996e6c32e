"""`SegmentSum`: index arrays of gradient sums, row by row in a fixed order. On the host and as tensors.

    gradient[u] = sum(factors[p] * vectors[sources[p]] for p in range(row_starts[u], row_starts[u + 1]))

`vectors` are the gradients of a rank's bags, for rows that it uses; or gradients received from all ranks, rank by rank,
for rows that it owns.

A GPU sums a row in one program, so a row that occurs in most examples would delay all others. `HostSegmentSum.split`
cuts such *long* rows into chunks of at most `max_terms` terms:

    terms ──chunks──> partial sums ──chunks of those──> … ──at most max_terms of them──> gradient of the long row

Rule of this file: *chunks depend on a term's position in its row*, so the sum of a row depends only on its own terms
and on `max_terms`, not on the other rows of the batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MAX_TERMS", "Chunks", "HostLongRows", "HostSegmentSum", "Int32", "LongRows", "SegmentSum"]

Int32 = NDArray[np.int32]

#: Maximal number of terms that one GPU program adds in sequence. A few terms cost a memory round trip, about as long as
#: a launch: 32 terms take the time of two or three launches, and a row of 16,384 or 32,768 terms needs two levels of
#: chunks. The order of summation, and so the bits of results on a GPU, depend on this number.
MAX_TERMS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HostChunks:
    """`Chunks` on the host."""

    starts: Int32
    ends: Int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLongRows:
    """`LongRows` on the host."""

    rows: NDArray[np.int64]
    levels: tuple[_HostChunks, ...]
    offsets: Int32
    num_terms: int
    max_terms: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSegmentSum:
    """`SegmentSum` on the host; k rows, n terms.

    Attributes:
        row_starts: int32 ``[k + 1]``, start of each row's terms.
        sources: int32 ``[n]``, vector of each term.
        coefficients: ``[n]``, factor of each term (mean: 1 / bag length); None: ones.
        occurrences: int32 ``[n]``, plan position of each term's occurrence; weighted groups only.
        long: rows summed in chunks; None: none.
    """

    row_starts: Int32
    sources: Int32
    coefficients: NDArray[np.float64] | None = None
    occurrences: Int32 | None = None
    long: HostLongRows | None = None

    def select(self, rows: NDArray[np.int64]) -> HostSegmentSum:
        """The sums of the given rows, in the given order; not split."""
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
        """The same sums, with rows of more than `max_terms` terms cut into chunks; None: no limit.

        Arrays of terms are shared, not copied: chunks are ranges of them.
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


def _cut(starts: Int32, counts: Int32, num_chunks: Int32, max_terms: int) -> _HostChunks:
    """Chunks of at most `max_terms` terms, row after row."""
    first_chunk = np.cumsum(num_chunks) - num_chunks
    chunk_starts = np.repeat((starts - first_chunk * max_terms).astype(np.int32), num_chunks)
    chunk_starts += np.arange(0, len(chunk_starts) * max_terms, max_terms, dtype=np.int32)
    chunk_ends = np.minimum(chunk_starts + np.int32(max_terms), np.repeat(starts + counts, num_chunks))
    return _HostChunks(starts=chunk_starts, ends=chunk_ends.astype(np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Half-open ranges of terms, or of partial sums of the previous level. Each range gives one partial sum.

    Attributes:
        starts, ends: int32 ``[c]``, for c chunks.
    """

    starts: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LongRows:
    """The m rows that are summed in chunks.

    Attributes:
        rows: int64 ``[m]``, row numbers.
        levels: chunks of terms, then chunks of the partial sums of the previous level; at least one level.
        offsets: int32 ``[m + 1]``, start of each row's partial sums of the last level, which are contiguous.
        num_terms: total number of terms of these rows.
        max_terms: limit of terms for chunks and for rows that are not long.
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
    """The vectors that are summed for each row: `HostSegmentSum` on the device.

    Attributes:
        row_starts: int32 ``[k + 1]``, on the host.
        row_offsets: int32 ``[k + 1]``, the same on the device.
        sources: int32 ``[n]``.
        coefficients: ``[n]`` in the dtype of vectors, or None.
        occurrences: int32 ``[n]``, or None.
        long: rows summed in chunks; None: each row is summed from its first to its last term.
    """

    row_starts: Int32
    row_offsets: Tensor
    sources: Tensor
    coefficients: Tensor | None
    occurrences: Tensor | None
    long: LongRows | None = None

    def __len__(self) -> int:
        return len(self.row_starts) - 1
