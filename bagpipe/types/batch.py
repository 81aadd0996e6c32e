"""`Batch`: one global batch of examples. Pure numpy, laid out like torchrec's KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_USE", "Batch", "ExpiredRows"]

#: In `Batch.next_use`: no batch uses the row again.
NO_USE = np.iinfo(np.int32).max

_Number = TypeVar("_Number", np.int64, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpiredRows:
    """Rows of one table of the data that expire before a batch.

    Attributes:
        features: numbers of the table's features.
        ids: int64, distinct, ascending as unsigned numbers.
    """

    features: tuple[int, ...]
    ids: NDArray[np.int64]


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
        labels: float32 ``[num_examples]``; of data with several labels ``[num_examples, num_labels]``.
        example_weights: float32 ``[num_examples]`` weights of the examples in loss and metrics, or None when they have
            none.
        times_s: int64 ``[num_examples]``, times of the examples in seconds since 1970 UTC; None: the data has no clock,
            or it is not read. As `next_use` they stay with the planner: a rank's part on the wire has none.
        next_use: int32 ``[num_occurrences]``, number of the batch that uses the row of each occurrence next, after this
            occurrence; this batch itself where it does so again, and `NO_USE` if none does. None: not known. It is a
            hint for the order of evictions and stays with the planner.
        is_born: bool ``[num_occurrences]``, the row of each occurrence is new: no batch before has used it since it was
            deleted last. None: rows do not expire. It stays with the planner.
        expired: the rows that are deleted before this batch, an entry for each table of the data; empty if there are
            none. They stay with the planner.
        reader_state: position of the data reader after this batch, JSON-able; a reader opened there yields the next
            batch. None: unknown. Its ``share``, if it has one, is that of the phase's batches up to this one.
        rank_examples: of a global batch whose examples the ranks brought: how many each one did, in rank order. Empty:
            the examples have no rank yet. It does not travel with a rank's part.
        parts: micro-batches that this batch is the concatenation of, in the order of its examples; they have its index.
            Empty: it is not divided. They stay in the process that made them.
    """

    index: int
    dense: NDArray[np.float32]
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None
    example_weights: NDArray[np.float32] | None = None
    times_s: NDArray[np.int64] | None = None
    next_use: NDArray[np.int32] | None = None
    is_born: NDArray[np.bool_] | None = None
    expired: tuple[ExpiredRows, ...] = ()
    reader_state: Mapping[str, Any] | None = None
    rank_examples: tuple[int, ...] = ()
    parts: tuple[Batch, ...] = ()

    @property
    def num_examples(self) -> int:
        return int(self.labels.shape[0])

    @property
    def targets(self) -> NDArray[np.float32]:
        """The targets of a loss: `labels`; with weights of examples ``[num_examples, num_labels + 1]``, these last."""
        if self.example_weights is None:
            return self.labels
        return np.column_stack([self.labels, self.example_weights])

    @property
    def num_features(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def is_one_hot(self) -> bool:
        """Every bag holds exactly one id: the common case, four times cheaper to test than to sum lengths."""
        return self.lengths.size == self.values.shape[0] and (not self.lengths.size or int(self.lengths.min()) == 1)

    def feature_offsets(self) -> NDArray[np.int64]:
        """int64 ``[num_features + 1]``: start of each feature's ids in `values`."""
        if self.is_one_hot:
            return np.arange(self.num_features + 1, dtype=np.int64) * self.num_examples
        offsets = np.zeros(self.num_features + 1, dtype=np.int64)
        np.cumsum(self.lengths.sum(axis=1, dtype=np.int32), out=offsets[1:])
        return offsets

    def select(self, examples: NDArray[np.integer], values: NDArray[np.int64] | None = None) -> Batch:
        """The batch of some examples, with the same index and layout. Copies consecutive examples in blocks.

        Args:
            examples: integers ``[num_selected]``, ascending numbers of the examples; can be empty.
            values: their ids, if they are known.
        """
        count = examples.shape[0]
        start = int(examples[0]) if count else 0
        is_range = count == 0 or int(examples[-1]) - start == count - 1
        chosen: slice | NDArray[np.integer] = slice(start, start + count) if is_range else examples
        return Batch(
            index=self.index,
            dense=self.dense[chosen],
            values=self._per_id(self.values, chosen) if values is None else values,
            lengths=np.ascontiguousarray(self.lengths[:, chosen]),
            labels=self.labels[chosen],
            weights=None if self.weights is None else self._per_id(self.weights, chosen),
            example_weights=None if self.example_weights is None else self.example_weights[chosen],
            times_s=None if self.times_s is None else self.times_s[chosen],
            reader_state=self.reader_state,
        )

    def _per_id(self, array: NDArray[_Number], chosen: slice | NDArray[np.integer]) -> NDArray[_Number]:
        """The part of an array of one number per id that belongs to the chosen examples."""
        if self.is_one_hot:
            by_bag = array.reshape(self.lengths.shape)
            picked = by_bag[:, chosen] if isinstance(chosen, slice) else by_bag.take(chosen, axis=1)
            return np.ascontiguousarray(picked).reshape(-1)
        if isinstance(chosen, slice):
            starts = self.feature_offsets()[:-1] + self.lengths[:, : chosen.start].sum(axis=1)
            stops = starts + self.lengths[:, chosen].sum(axis=1)
            parts: list[NDArray[_Number]] = [
                array[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            ]
            return np.concatenate([array[:0], *parts])
        ends = np.cumsum(self.lengths, dtype=np.int64).reshape(self.lengths.shape)[:, chosen].reshape(-1)
        counts = self.lengths[:, chosen].reshape(-1)
        ends_in_selection = np.cumsum(counts, dtype=np.int64)
        entries = np.repeat(ends - ends_in_selection, counts)
        return array.take(entries + np.arange(entries.shape[0]))
