"""`CheckpointStore`: the rows of a checkpoint as a store that is only read.

row files of a checkpoint ──CheckpointRows──> read_many ──> evaluation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.manifest import BrokenCheckpoint, Manifest
from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest, ReadResult, Rows, StoreStatistics, WriteRequest
from bagpipe.store.row_sums import RowSums
from bagpipe.types.schema import RowSchema

__all__ = ["CheckpointStore"]


class CheckpointStore:
    """A `Store` that holds what a checkpoint holds. Every call that would change it raises StoreError.

    Args:
        folder: of the checkpoint.
        manifest: its manifest.
        schema: `RowSchema.from_json` of the manifest's row schema.

    Raises:
        InputError: a file of the checkpoint is missing, or is not whole.
    """

    def __init__(self, folder: Path, manifest: Manifest, schema: RowSchema) -> None:
        self.schema = schema
        self._folder = folder
        self._rows_read = self._rows_found = 0
        try:
            self._rows = CheckpointRows(folder, manifest, schema)
        except BrokenCheckpoint as error:
            raise InputError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """True: it has its own schema."""
        return True

    def claim(self, *, reloads: bool = False) -> bool:
        """Raises StoreError."""
        raise self._refusal()

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """See `Store`."""
        result = self._rows.read(table, ids)
        self._rows_read += len(ids)
        self._rows_found += int(result.found.sum())
        return result

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store`."""
        return [self.read(table, ids) for table, ids in requests]

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """Raises StoreError."""
        raise self._refusal()

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """Raises StoreError."""
        raise self._refusal()

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        """Raises StoreError."""
        raise self._refusal()

    def fence(self, fence: Fence) -> None:
        """Raises StoreError."""
        raise self._refusal()

    def rotate(self) -> NDArray[np.int64]:
        """Raises StoreError."""
        raise self._refusal()

    def reset(self, token: str) -> None:
        """Raises StoreError."""
        raise self._refusal()

    def ledger(self) -> Ledger:
        """Raises StoreError."""
        raise self._refusal()

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store`."""
        return self._rows.ids(table)

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store`. Each table is a group."""
        for table in tables:
            yield {table: self.ids(table)}

    def sum_changes(self) -> RowSums:
        """Raises StoreError."""
        raise self._refusal()

    def statistics(self) -> StoreStatistics:
        """See `Store`."""
        return StoreStatistics(rows_read=self._rows_read, rows_found=self._rows_found)

    def _refusal(self) -> StoreError:
        return StoreError(f"the rows of the checkpoint {self._folder} are only read")
