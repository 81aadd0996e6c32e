"""`BadRowLimit`: the end of a job whose data holds malformed rows without end (`data.bad_rows = skip`).

    blocks in the order of reading ──> malformed rows since the last good one ──more than MAX_BAD_ROWS──> InputError

A gzip stream of 1 MB can hold a billion empty lines. A reader needs the memory of one block for them; the limit bounds
the time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from data.source import Block, Source

__all__ = ["MAX_BAD_ROWS", "BadRowLimit"]

#: Malformed rows without a good one between. The longest run of a log that is worth reading is far shorter; the fastest
#: reader passes over so many within seconds, the slowest within minutes.
MAX_BAD_ROWS = 10_000_000


class BadRowLimit:
    """Counts the malformed rows that follow each other. One for each pass over a source.

    Args:
        source: of the blocks.
        max_rows: most malformed rows without a good one between.
    """

    def __init__(self, source: Source, max_rows: int = MAX_BAD_ROWS) -> None:
        self._source = source
        self._max_rows = max_rows
        self._run = 0

    def check(self, block: Block, num_rows: int, bad_rows: NDArray[np.int64]) -> None:
        """Count the rows of the next block.

        Args:
            block: the block.
            num_rows: its raw rows.
            bad_rows: int64 ascending: the malformed ones among them.

        Raises:
            InputError: too many malformed rows, at the place of the first beyond the limit.
        """
        if not bad_rows.size:
            self._run = self._run if num_rows == 0 else 0
            return
        good = np.delete(np.arange(-1, num_rows + 1), bad_rows + 1)  # and one before the block, one after it
        before, self._run = self._run, int(good[-1] - good[-2] - 1)
        runs = np.diff(good) - 1
        runs[0] += before
        if runs.size == 1:
            self._run += before
        too_long = np.flatnonzero(runs > self._max_rows)
        if too_long.size:
            number = int(too_long[0])
            row = int(good[number]) + 1 + self._max_rows - (before if number == 0 else 0)
            raise InputError(
                f"{self._source.locate(block, row)}: expected a good row among {self._max_rows + 1} rows, "
                f"got as many malformed ones in a row (data.bad_rows = skip)"
            )
