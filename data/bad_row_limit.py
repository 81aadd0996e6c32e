"""`BadRowLimit`: the end of a job whose data is mostly malformed rows (`data.bad_rows = skip`).

    blocks in the order of reading ──> balance: + 1 for a malformed row, - GOOD_ROW for a good one, at least 0
                                       balance > MAX_BAD_ROWS ──> InputError

A gzip stream of 1 MB can hold a billion empty lines, with a good row now and then. A reader needs the memory of one
block for them; the limit bounds the time. Data with 1 % good rows, evenly spread, never reaches it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from data.source import Block, Source

__all__ = ["GOOD_ROW", "MAX_BAD_ROWS", "BadRowLimit"]

#: The balance at which reading ends. The longest run of malformed rows in a log that is worth reading is far shorter;
#: the fastest reader passes over so many within seconds, the slowest within minutes.
MAX_BAD_ROWS = 10_000_000
#: Malformed rows that a good row makes up for.
GOOD_ROW = 100


class BadRowLimit:
    """Weighs malformed rows against good ones. One for each pass over a source.

    Args:
        source: of the blocks.
        max_rows: the limit.
    """

    def __init__(self, source: Source, max_rows: int = MAX_BAD_ROWS) -> None:
        self._source = source
        self._max_rows = max_rows
        self._balance = 0

    def check(self, block: Block, num_rows: int, bad_rows: NDArray[np.int64]) -> None:
        """Weigh the rows of the next block.

        Args:
            block: the block.
            num_rows: its raw rows.
            bad_rows: int64 ascending: the malformed ones among them.

        Raises:
            InputError: too many malformed rows, at the place of the first beyond the limit.
        """
        if not bad_rows.size:
            self._balance = max(0, self._balance - GOOD_ROW * num_rows)
            return
        # The balance after a row is the sum up to it, less the least sum before (0 at first): a walk that stops at 0.
        balances = np.full(num_rows, -GOOD_ROW, np.int64)
        balances[bad_rows] = 1
        balances[0] += self._balance
        np.cumsum(balances, out=balances)
        least = np.minimum.accumulate(balances)
        balances -= np.minimum(least, 0, out=least)
        self._balance = int(balances[-1])
        if balances.max() <= self._max_rows:
            return
        row = int((balances > self._max_rows).argmax())
        raise InputError(
            f"{self._source.locate(block, row)}: expected at least one good row for {GOOD_ROW} malformed ones, got "
            f"{self._max_rows + 1} malformed ones beyond that (data.bad_rows = skip)"
        )
