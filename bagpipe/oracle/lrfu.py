"""What a row is worth to the cache while the window does not use it: its uses so far, older ones counting less.

    weight of a row = sum over its uses of 2 ** -(age of the use / half-life)
    worth           = time of the last use + half-life * log2(weight at that time)
    at a use:         worth = now + half-life * log2(1 + 2 ** ((worth - now) / half-life))

A row's weight decays like every other's, so the order of two rows changes only when one of them is used: worth is a
number that stands still, and a row that was evicted takes it along (LRFU: Lee et al., IEEE Trans. Computers 50(12),
2001). A long half-life is LFU, a short one LRU. Time runs with the uses, not with the batches, and the half-life is
`HALF_LIFE_CACHES` cachefuls of them: long enough to tell rates apart, short enough to follow a log that drifts.

Time and worth are whole ticks, `TICKS` to a half-life, and the law of the third line is a table: no rounding depends on
the machine's vector units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["HALF_LIFE_CACHES", "NEVER_USED", "NO_WORTH", "TICKS", "Ghosts", "LrfuClock"]

#: Uses in a half-life, in units of the rows that all caches hold. Measured (benchmarks/policy): from 8 to 64 little
#: changes where popularity is steady; where it moves, shorter is better; TinyLFU (Einziger et al. 2017) takes 10.
HALF_LIFE_CACHES = 16
#: Ticks of time in a half-life.
TICKS = 1 << 10
#: Worth of a row that was never planned, and of one of which no more is known.
NEVER_USED, NO_WORTH = 0, 1

# A use that long ago counts nothing, and one more use adds nothing to a weight of 2**12: the table ends there.
_PAST = 12 * TICKS
_AGES = np.arange(-_PAST, _PAST + 1) / TICKS
_GAIN: NDArray[np.int32] = np.rint(TICKS * np.log2(1.0 + np.exp2(_AGES))).astype(np.int32)
#: Time begins when nothing known at its beginning can matter, and stands still at the end of its range.
_FIRST, _LAST = NO_WORTH + _PAST, 1 << 30


class LrfuClock:
    """Counts uses and says what they make rows worth.

    Args:
        num_slots: rows that all caches hold together.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_uses = 0

    def use(self, worth: NDArray[np.int32]) -> NDArray[np.int32]:
        """A batch uses rows that were worth this: what they are worth now. int32, as long."""
        ticks = self._num_uses * TICKS // (HALF_LIFE_CACHES * self._num_slots)
        now = np.int32(min(_FIRST + ticks, _LAST))
        self._num_uses += worth.shape[0]
        gained: NDArray[np.int32] = _GAIN.take(worth - (now - np.int32(_PAST)), mode="clip")
        gained += now
        return gained


class Ghosts:
    """Worth of evicted rows of unbounded vocabularies, in fixed memory: of two rows in one cell the worthier stays.

    Args:
        num_cells: a power of two; 8 B each.
    """

    def __init__(self, num_cells: int = 1 << 21) -> None:
        self._cells = np.zeros(num_cells, dtype=np.uint64)

    def recall(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """int32: worth of the rows with these hashes, `NO_WORTH` where none is remembered."""
        words = self._cells.take(self._places(hashes))
        worth = words.astype(np.uint32).view(np.int32)
        known: NDArray[np.int32] = np.where((words ^ hashes) >> np.uint64(32) == 0, worth, np.int32(NO_WORTH))
        return np.maximum(known, np.int32(NO_WORTH))

    def remember(self, hashes: NDArray[np.uint64], worth: NDArray[np.int32]) -> None:
        """Rows with these hashes are evicted and were worth this."""
        places = self._places(hashes)
        here = self._cells.take(places).astype(np.uint32).view(np.int32)
        worthier = np.flatnonzero(worth >= here)
        words = (hashes >> np.uint64(32) << np.uint64(32)) | worth.astype(np.uint64)
        self._cells[places[worthier]] = words[worthier]

    def _places(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        return (hashes & np.uint64(self._cells.shape[0] - 1)).astype(np.int64)
