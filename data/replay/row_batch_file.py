"""`RowBatchFile`: the rows of each batch in a file, written once in order and read by batch number.

append(rows) ──bytes──> NAME.rows    ──ends──> NAME.ends (8 B per batch)
file[i]      ──two reads of ends, one of rows──> int32 rows of batch i

Memory does not grow with the log. The `with` block removes both files. Other processes can read them meanwhile.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowBatchFile", "RowBatches"]

_ROW_BYTES = 4
_END_BYTES = 8


class RowBatches(Protocol):
    """The batches of a log, each an int32 array of distinct row numbers."""

    def __len__(self) -> int:
        """Batches."""
        ...

    def __getitem__(self, number: int, /) -> NDArray[np.int32]:
        """The rows of batch `number`, from 0. IndexError after the last one."""
        ...

    def flush(self) -> None:
        """Let other processes see all batches."""
        ...


class RowBatchFile:
    """int32 arrays in a file, by number. Use it inside its `with` block.

    Args:
        folder: existing folder of the two temporary files.
        name: stem of the file names, unique in the folder.
        reads: the files exist, and are only read.
    """

    def __init__(self, folder: Path, name: str = "row-batches", *, reads: bool = False) -> None:
        self._paths = (folder / f"{name}.rows", folder / f"{name}.ends")
        self._reads = reads
        self._files: tuple[BinaryIO, ...] = ()
        self._num_batches = 0
        self._num_rows = 0
        self._num_flushed = 0

    def __enter__(self) -> Self:
        mode = "rb" if self._reads else "x+b"
        rows: Any = self._paths[0].open(mode)
        try:
            ends: Any = self._paths[1].open(mode)
        except BaseException:
            rows.close()
            if not self._reads:
                self._paths[0].unlink()
            raise
        self._files = (rows, ends)
        if self._reads:
            self._num_batches = self._num_flushed = os.fstat(ends.fileno()).st_size // _END_BYTES
            self._num_rows = self._end(self._num_batches - 1) if self._num_batches else 0
        return self

    def __exit__(self, *_: object) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            with suppress(OSError):  # the disk can be full; the buffered data is not needed
                file.close()
            if not self._reads:
                path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._num_batches

    @property
    def num_rows(self) -> int:
        """Rows of all batches."""
        return self._num_rows

    def append(self, rows: NDArray[np.int32]) -> None:
        """Append the next batch."""
        self._num_rows += rows.shape[0]
        self._num_batches += 1
        data, ends = self._files
        data.write(np.ascontiguousarray(rows, dtype="<i4").data)
        ends.write(self._num_rows.to_bytes(_END_BYTES, "little"))

    def __getitem__(self, number: int, /) -> NDArray[np.int32]:
        """int32: batch `number`, from 0. IndexError if it does not exist."""
        if not 0 <= number < self._num_batches:
            raise IndexError(f"batch {number} of {self._num_batches}")
        self.flush()
        data = self._files[0]
        stop = self._end(number)
        start = self._end(number - 1) if number else 0
        rows = np.empty(stop - start, dtype="<i4")
        view = rows.view(np.uint8)
        filled = 0
        while filled < view.shape[0]:
            got = os.preadv(data.fileno(), [view[filled:].data], start * _ROW_BYTES + filled)
            if not got:
                raise OSError(
                    f"{self._paths[0]}: ends at {start * _ROW_BYTES + filled} bytes, changed by another process?"
                )
            filled += got
        return rows.astype(np.int32, copy=False)

    def flush(self) -> None:
        """See `RowBatches`."""
        if self._num_flushed < self._num_batches:
            for file in self._files:
                file.flush()
            self._num_flushed = self._num_batches

    def _end(self, number: int) -> int:
        return int.from_bytes(os.pread(self._files[1].fileno(), _END_BYTES, number * _END_BYTES), "little")
