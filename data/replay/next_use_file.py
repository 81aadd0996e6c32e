"""`NextUseFile`: the next use of every row of every batch of a log, in a file.

    row batches, from the last to the first ──upcoming[row] = batch──> file[b]: next uses of the rows of batch b

Memory: 4 B per distinct row. Disk: as much as the row batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import NO_USE, Batch
from data.replay.row_batch_file import RowBatches, RowBatchFile

__all__ = ["LOG_POLICY", "NextUseFile", "told"]

#: The oracle with `OracleSpec.horizon` log: rows without a use in the window leave by their next use in the whole log.
LOG_POLICY = "belady-log"


class NextUseFile:
    """int32 arrays by batch number: the batch that uses each row next, `NO_USE` if there is none.

    The `with` block writes the file and removes it.

    Args:
        batches: the rows of each batch, numbers in ``[0, num_rows)``.
        folder: existing folder of the temporary file.
        expired: the rows that expire before each batch. The next use of a row that expires before it is ``~batch``, a
            negative number. None: that does not matter.
    """

    def __init__(self, batches: RowBatches, num_rows: int, folder: Path, *, expired: RowBatches | None = None) -> None:
        self._batches = batches
        self._expired = expired
        self._num_rows = num_rows
        # Written from the end of the log: the last batch comes first.
        self._file = RowBatchFile(folder, "next-uses")

    def __enter__(self) -> Self:
        self._file.__enter__()
        try:
            upcoming = np.full(self._num_rows, NO_USE, dtype=np.int32)
            for number in range(len(self._batches) - 1, -1, -1):
                rows = self._batches[number]
                self._file.append(upcoming[rows])
                upcoming[rows] = number
                if self._expired is not None:
                    gone = self._expired[number]
                    next_uses = upcoming[gone]
                    upcoming[gone] = np.where(next_uses == NO_USE, NO_USE, ~next_uses)
        except BaseException:
            self._file.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def __getitem__(self, number: int, /) -> NDArray[np.int32]:
        return self._file[len(self._batches) - 1 - number]


def told(batches: Iterable[Batch], next_uses: NextUseFile, spec: OracleSpec) -> Generator[Batch, None, None]:
    """The batches, each with its `Batch.next_use`. A feature of several tables gets that of its last table.

    Args:
        batches: of the log, in order.
        next_uses: of its rows, in the order of `BatchIndex.unique`.
        spec: its tables and features.
    """
    indexer = Indexer(spec)
    for batch in batches:
        found = next_uses[batch.index].take(indexer.index(batch).inverse)
        offsets = batch.feature_offsets().tolist()
        next_use = np.full(batch.values.shape[0], NO_USE, dtype=np.int32)
        start = 0
        for ref in spec.features:
            first, stop = offsets[ref.feature : ref.feature + 2]
            next_use[first:stop] = found[start : start + stop - first]
            start += stop - first
        yield dataclasses.replace(batch, next_use=next_use)
