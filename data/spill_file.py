"""`SpillFile`: an array on disk without a name, read and written at any place by any thread."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, Generic, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["SpillFile"]

_Word = TypeVar("_Word", np.uint32, np.uint64, np.int64)


class SpillFile(Generic[_Word]):
    """One dimension of words. Used with `with`, at whose end its bytes are gone, as when the process ends.

    Args:
        folder: existing folder on the disk to use.
        dtype: of the words.
    """

    def __init__(self, folder: Path, dtype: type[_Word]) -> None:
        self._folder = folder
        self._dtype: np.dtype[_Word] = np.dtype(dtype)
        self._open: BinaryIO | None = None
        self._file = -1

    def __enter__(self) -> Self:
        self._open = cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder, buffering=0))
        self._file = self._open.fileno()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._open is not None, "entered"
        self._open.close()

    def write(self, place: int, words: NDArray[_Word]) -> None:
        """Write words from a place on.

        Raises:
            OSError: no room on the disk.
        """
        view, offset = np.ascontiguousarray(words).view(np.uint8).data, place * self._dtype.itemsize
        while view:
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done

    def read(self, place: int, count: int) -> NDArray[_Word]:
        """So many words from a place on."""
        words = np.empty(count, dtype=self._dtype)
        self.read_into(place, words)
        return words

    def read_into(self, place: int, words: NDArray[_Word]) -> None:
        """Fill a contiguous array from a place on.

        Raises:
            OSError: the file is shorter.
        """
        view, offset = words.view(np.uint8).data, place * self._dtype.itemsize
        while view:
            done = os.preadv(self._file, [view], offset)
            if not done:
                raise OSError("a temporary file ends early")
            view, offset = view[done:], offset + done
