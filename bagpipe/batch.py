"""`Batch`: one global batch as the loader hands it on. Pure numpy, laid out like torchrec's KeyedJaggedTensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One batch of examples.

    Attributes:
        index: position of the batch in its phase (training or evaluation), from 0.
        dense: float32 ``[num_examples, num_dense]``.
        values: int64 ``[num_occurrences]``, ids, *key-major*: all ids of feature 0, then of feature 1, …;
            within a feature by example, within an example in bag order.
        lengths: int32 ``[num_features, num_examples]``, ids per bag; 0 is an empty bag.
        weights: float32 ``[num_occurrences]`` per-id weights, or None when no feature is weighted.
        labels: float32 ``[num_examples]``.
    """

    index: int
    dense: NDArray[np.float32]
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None

    @property
    def num_examples(self) -> int:
        return int(self.labels.shape[0])

    @property
    def num_features(self) -> int:
        return int(self.lengths.shape[0])

    def feature_offsets(self) -> NDArray[np.int64]:
        """int64 ``[num_features + 1]``: where each feature's ids start in `values`."""
        if self.lengths.size == self.values.shape[0] and self.lengths.size and int(self.lengths.min()) == 1:
            # One id in every bag: the common case, and a minimum is four times cheaper than the sums.
            return np.arange(0, self.lengths.size + 1, self.num_examples, dtype=np.int64)
        offsets = np.zeros(self.num_features + 1, dtype=np.int64)
        np.cumsum(self.lengths.sum(axis=1, dtype=np.int32), out=offsets[1:])
        return offsets
