"""`RowSums`: per bucket, the sum of its rows' mixed check words modulo 2**64. No I/O.

    sum of a bucket at the end = its sum at the start + words of the rows written - words of the rows they replaced

The right side is kept while a job runs, the left side is computed from the rows of the store. They differ if a row was
not the one last written, when it was read or at the end: each write takes the word of the row it replaced out of the
sum, so an earlier value takes out a word that is gone already.

Words are mixed, because a check word is a linear function of its record: values at equal distances (2.0, 3.0 and 4.0)
have words at equal distances, whose errors could cancel.

Offline memory checking: Blum, Evans, Gemmell, Kannan and Naor, "Checking the correctness of memories", 1991.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.keys import bucket_of
from bagpipe.types.splitmix64 import mix

__all__ = ["RowSums"]

_MASK = (1 << 64) - 1


class RowSums:
    """Sums of one namespace.

    Args:
        num_buckets: buckets of the namespace.

    Attributes:
        values: uint64 ``[num_buckets]``.
    """

    def __init__(self, num_buckets: int) -> None:
        self.values = np.zeros(num_buckets, np.uint64)

    @property
    def num_buckets(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, values: Sequence[int]) -> RowSums:
        """The sums `to_list` has returned; each number modulo 2**64."""
        sums = cls(len(values))
        sums.values[:] = [value & _MASK for value in values]
        return sums

    def to_list(self) -> list[int]:
        """The sums as JSON values."""
        values: list[int] = self.values.tolist()
        return values

    def copy(self) -> RowSums:
        """The sums as they are now."""
        return RowSums.of(self.to_list())

    def add_rows(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
        """Add rows.

        Args:
            tables: table numbers ``[n]``, or broadcastable to it.
            ids: ids ``[n]``.
            words: check words ``[n]``; zero for a row that does not exist.
        """
        np.add.at(self.values, bucket_of(tables, ids, self.num_buckets), mix(words.copy()))

    def replace_rows(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        words: NDArray[np.uint64],
        replaced: NDArray[np.uint64],
    ) -> None:
        """Add rows as `add_rows` does, and remove those that they replace, with check words `replaced` ``[n]``."""
        changes = mix(words.copy()) - mix(replaced.copy())
        np.add.at(self.values, bucket_of(tables, ids, self.num_buckets), changes)

    def __add__(self, other: RowSums) -> RowSums:
        return RowSums.of((self.values + other.values).tolist())

    def __sub__(self, other: RowSums) -> RowSums:
        return RowSums.of((self.values - other.values).tolist())

    def differing(self, other: RowSums) -> NDArray[np.int64]:
        """Buckets whose sums differ."""
        return np.flatnonzero(self.values != other.values)
