"""`Columns`: the good rows of a block. Selects rows and joins them into a `Batch` without a loop over rows.

Ids are key-major. starts[f, i]: position in `values` of row i's first id of feature f; starts[f, n]: end of feature f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.batch import Batch

__all__ = ["Columns", "RowSlice", "bag_starts", "join", "join_distances", "take_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The good rows of a block, laid out like a `Batch`.

    Attributes:
        labels: float32 ``[n]``, or ``[n, num_labels]`` for several labels.
        dense: float32 ``[n, num_dense]``.
        values: int64 ``[num_occurrences]``, key-major as in `Batch`.
        lengths: int32 ``[num_features, n]``.
        weights: float32 ``[num_occurrences]``, or None when no feature is weighted.
        num_raw_rows: rows of the block, bad ones included.
        bad_rows: int64 ``[num_raw_rows - n]``, ascending positions of the bad rows in the block.
        example_weights: float32 ``[n]``, or None when the examples have none.
        distances: uint32 ``[num_occurrences]``, examples up to the next use of each id's row (`data.next_use_sort`), or
            None when they are not read.
        times_s: int64 ``[n]``, seconds since 1970 UTC (`data.clock`), or None when they are not read.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None
    num_raw_rows: int
    bad_rows: NDArray[np.int64]
    example_weights: NDArray[np.float32] | None = None
    distances: NDArray[np.uint32] | None = None
    times_s: NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        return int(self.labels.shape[0])


def bag_starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 ``[num_features, n + 1]``: first id of every bag in key-major order, and each feature's end."""
    starts = np.zeros((lengths.shape[0], lengths.shape[1] + 1), np.int64)
    np.cumsum(lengths, axis=1, out=starts[:, 1:])
    starts[1:] += np.cumsum(starts[:-1, -1])[:, None]
    return starts


def take_rows(columns: Columns, rows: NDArray[np.int64]) -> Columns:
    """The good rows at positions `rows`, in that order. `num_raw_rows` and `bad_rows` stay those of the whole block."""
    lengths = columns.lengths[:, rows]
    first = bag_starts(columns.lengths)[:, :-1][:, rows].ravel()
    counts = lengths.ravel()
    values, weights = columns.values, columns.weights
    if int(counts.max(initial=0)) <= 1:
        picked = first[counts > 0]
    else:
        # position within its bag of every id, added to where the bag begins
        ends = np.cumsum(counts, dtype=np.int64)
        picked = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(first - (ends - counts), counts)
    return Columns(
        labels=columns.labels[rows],
        dense=columns.dense[rows],
        values=values[picked],
        lengths=lengths,
        weights=None if weights is None else weights[picked],
        num_raw_rows=columns.num_raw_rows,
        bad_rows=columns.bad_rows,
        example_weights=None if columns.example_weights is None else columns.example_weights[rows],
        distances=None if columns.distances is None else columns.distances[picked],
        times_s=None if columns.times_s is None else columns.times_s[rows],
    )


class RowSlice:
    """Good rows ``[low, high)`` of a block as part of a batch; copies nothing."""

    __slots__ = ("columns", "high", "low", "starts")

    def __init__(self, columns: Columns, starts: NDArray[np.int64], low: int, high: int) -> None:
        self.columns = columns
        self.starts = starts
        self.low = low
        self.high = high

    def __len__(self) -> int:
        return self.high - self.low

    def feature_slice(self, feature: int) -> slice:
        """Range of a feature's ids in the block's `values`."""
        return slice(int(self.starts[feature, self.low]), int(self.starts[feature, self.high]))


def join(index: int, pieces: Sequence[RowSlice]) -> Batch:
    """Join consecutive slices (at least one) into a batch."""
    features = range(pieces[0].columns.lengths.shape[0])
    values = [piece.columns.values[piece.feature_slice(f)] for f in features for piece in pieces]
    weights = None
    if pieces[0].columns.weights is not None:
        weights = np.concatenate(
            [_weights(piece)[piece.feature_slice(f)] for f in features for piece in pieces] or [np.zeros(0, np.float32)]
        )
    example_weights = None
    if pieces[0].columns.example_weights is not None:
        example_weights = np.concatenate([_example_weights(piece) for piece in pieces])
    times_s = None
    if pieces[0].columns.times_s is not None:
        times_s = np.concatenate([_times_s(piece) for piece in pieces])
    return Batch(
        index=index,
        dense=np.concatenate([piece.columns.dense[piece.low : piece.high] for piece in pieces]),
        values=np.concatenate(values) if values else np.zeros(0, np.int64),
        lengths=np.concatenate([piece.columns.lengths[:, piece.low : piece.high] for piece in pieces], axis=1),
        labels=np.concatenate([piece.columns.labels[piece.low : piece.high] for piece in pieces]),
        weights=weights,
        example_weights=example_weights,
        times_s=times_s,
    )


def join_distances(pieces: Sequence[RowSlice]) -> NDArray[np.uint32] | None:
    """`Columns.distances` of the batch that `join` makes."""
    features = range(pieces[0].columns.lengths.shape[0])
    found = [piece.columns.distances for piece in pieces]
    parts = [
        distances[piece.feature_slice(f)]
        for f in features
        for piece, distances in zip(pieces, found, strict=True)
        if distances is not None
    ]
    return np.concatenate(parts) if parts else None


def _weights(piece: RowSlice) -> NDArray[np.float32]:
    weights = piece.columns.weights
    assert weights is not None, "either all blocks of a source have weights or none has"
    return weights


def _example_weights(piece: RowSlice) -> NDArray[np.float32]:
    weights = piece.columns.example_weights
    assert weights is not None, "either all blocks of a source have weights of examples or none has"
    return weights[piece.low : piece.high]


def _times_s(piece: RowSlice) -> NDArray[np.int64]:
    times_s = piece.columns.times_s
    assert times_s is not None, "either all blocks of a source have times or none has"
    return times_s[piece.low : piece.high]
