"""Rows of `Columns`, picked and put together. Key-major ids make both a matter of offsets, never of single rows.

starts[f, i] = where row i's ids of feature f begin in `values`; starts[f, n] = where feature f ends
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.batch import Batch
from data.source import Columns

__all__ = ["RowRange", "bag_starts", "join", "take_rows"]


def bag_starts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 ``[num_features, n + 1]``: first id of every bag in key-major order, and each feature's end."""
    starts = np.zeros((lengths.shape[0], lengths.shape[1] + 1), np.int64)
    np.cumsum(lengths, axis=1, out=starts[:, 1:])
    starts[1:] += np.cumsum(starts[:-1, -1])[:, None]
    return starts


def take_rows(columns: Columns, rows: NDArray[np.int64]) -> Columns:
    """The good rows at positions `rows`, in that order. Raw-row bookkeeping stays that of the whole block."""
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
    )


class RowRange:
    """Good rows ``[low, high)`` of a block, without copying: a piece of a batch."""

    __slots__ = ("columns", "high", "low", "starts")

    def __init__(self, columns: Columns, starts: NDArray[np.int64], low: int, high: int) -> None:
        self.columns = columns
        self.starts = starts
        self.low = low
        self.high = high

    def __len__(self) -> int:
        return self.high - self.low

    def feature_slice(self, feature: int) -> slice:
        """Where the ids of feature number `feature` lie in the block's values."""
        return slice(int(self.starts[feature, self.low]), int(self.starts[feature, self.high]))


def join(index: int, pieces: Sequence[RowRange]) -> Batch:
    """One batch out of consecutive pieces (at least one)."""
    features = range(pieces[0].columns.lengths.shape[0])
    values = [piece.columns.values[piece.feature_slice(f)] for f in features for piece in pieces]
    weights = None
    if pieces[0].columns.weights is not None:
        weights = np.concatenate(
            [_weights(piece)[piece.feature_slice(f)] for f in features for piece in pieces] or [np.zeros(0, np.float32)]
        )
    return Batch(
        index=index,
        dense=np.concatenate([piece.columns.dense[piece.low : piece.high] for piece in pieces]),
        values=np.concatenate(values) if values else np.zeros(0, np.int64),
        lengths=np.concatenate([piece.columns.lengths[:, piece.low : piece.high] for piece in pieces], axis=1),
        labels=np.concatenate([piece.columns.labels[piece.low : piece.high] for piece in pieces]),
        weights=weights,
    )


def _weights(piece: RowRange) -> NDArray[np.float32]:
    weights = piece.columns.weights
    assert weights is not None, "all blocks of a source are weighted, or none is"
    return weights
