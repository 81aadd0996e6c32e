"""LRFU scores of rows without a known next use (Lee et al., IEEE Trans. Computers 50(12), 2001).

    weight of a row = sum over its uses of 2 ** -(age of the use / half-life)
    score           = time of the last use + half-life * log2(weight at that time)
    at a use:         score = now + half-life * log2(1 + 2 ** ((score - now) / half-life))

All weights decay at the same rate, so the order of two rows changes only when one of them is used. A score is therefore
a constant between uses, and an evicted row keeps its score. A long half-life is LFU, a short one LRU. Time counts uses,
not batches. The half-life is `HALF_LIFE_CACHES` times the cache size: long enough to tell rates apart, short enough to
follow drift.

Times and scores are integer ticks, `TICKS` per half-life, and the update in the third line is a lookup table. No
rounding depends on the machine's vector units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["HALF_LIFE_CACHES", "NEVER_USED", "NO_SCORE", "TICKS", "GhostScores", "LrfuClock"]

#: Uses in a half-life, as a multiple of the rows that all caches hold. Measured (benchmarks/policy): with steady
#: popularity 8 to 64 differ little; with drift shorter is better. TinyLFU (Einziger et al. 2017) takes 10.
HALF_LIFE_CACHES = 16
#: Ticks of time in a half-life.
TICKS = 1 << 10
#: Score of a row that was never planned, and of a known row whose score is forgotten.
NEVER_USED, NO_SCORE = 0, 1

# A use of that age counts nothing, and one more use adds nothing to a weight of 2**12, so the table ends there.
_PAST = 12 * TICKS
_AGES = np.arange(-_PAST, _PAST + 1) / TICKS
_GAIN: NDArray[np.int32] = np.rint(TICKS * np.log2(1.0 + np.exp2(_AGES))).astype(np.int32)
#: Time starts past the age at which initial scores matter. It stops at the end of its range.
_FIRST, _LAST = NO_SCORE + _PAST, 1 << 30


class LrfuClock:
    """Counts uses and updates scores.

    Args:
        num_slots: rows that all caches hold together.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_uses = 0  # since the latest growth
        self._ticks = 0  # at the latest growth

    def grow(self, num_slots: int) -> None:
        """The caches hold so many rows from now on, at least as many as before. The time so far stays."""
        if num_slots > self._num_slots:
            self._ticks, self._num_uses, self._num_slots = self._time(), 0, num_slots

    def _time(self) -> int:
        return self._ticks + self._num_uses * TICKS // (HALF_LIFE_CACHES * max(self._num_slots, 1))

    def use(self, scores: NDArray[np.int32]) -> NDArray[np.int32]:
        """The new scores, int32, of rows with these scores after a batch uses them."""
        now = np.int32(min(_FIRST + self._time(), _LAST))
        self._num_uses += scores.shape[0]
        gained: NDArray[np.int32] = _GAIN.take(scores - (now - np.int32(_PAST)), mode="clip")
        gained += now
        return gained


class GhostScores:
    """Scores of evicted rows of unbounded vocabularies, in fixed memory. A cell keeps the higher of two scores.

    Args:
        num_cells: a power of two; 8 B each.
    """

    def __init__(self, num_cells: int = 1 << 21) -> None:
        self._cells = np.zeros(num_cells, dtype=np.uint64)

    def recall(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """int32: scores of the rows with these hashes, `NO_SCORE` for unknown rows."""
        words = self._cells.take(self._cells_of(hashes))
        scores = words.astype(np.uint32).view(np.int32)
        known: NDArray[np.int32] = np.where((words ^ hashes) >> np.uint64(32) == 0, scores, np.int32(NO_SCORE))
        return np.maximum(known, np.int32(NO_SCORE))

    def remember(self, hashes: NDArray[np.uint64], scores: NDArray[np.int32], counts: Sequence[int]) -> None:
        """Remember the scores of evicted rows with these hashes, in parts of so many rows, one after the other."""
        all_cells = self._cells_of(hashes)
        words = (hashes >> np.uint64(32) << np.uint64(32)) | scores.astype(np.uint64)
        start = 0
        for count in counts:
            part = slice(start, start + count)
            cells = all_cells[part]
            here = self._cells.take(cells).astype(np.uint32).view(np.int32)
            higher = np.flatnonzero(scores[part] >= here)
            self._cells[cells.take(higher)] = words[part].take(higher)
            start += count

    def _cells_of(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (hashes & np.uint64(self._cells.shape[0] - 1)).astype(np.int64)
