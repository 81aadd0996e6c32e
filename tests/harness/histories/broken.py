"""Stores with a defect on purpose, which show that the checker finds what it looks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.interface import Rows, Store

__all__ = ["DEFECTS"]


class _Around:
    """A store whose other methods are those of the store inside."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Unfenced(_Around):
    """Writes without a fence: nobody can end it."""

    def fence(self, fence: Fence) -> None:
        """Do nothing."""


class _Early(_Around):
    """Acknowledges each write before it makes it, with the next one."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._held: tuple[int, NDArray[np.int64], Rows] | None = None

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """Make the write before, and keep this one."""
        held, self._held = self._held, (table, ids, rows)
        if held is not None:
            self._store.write(*held)


class _Splitting(_Around):
    """Writes each row on its own."""

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """Write one row after the other."""
        for number in range(len(ids)):
            self._store.write(table, ids[number : number + 1], rows[number : number + 1])


class _Refusing(_Around):
    """Writes nothing, and says so."""

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """Refuse.

        Raises:
            StoreError: always.
        """
        raise StoreError("this store refuses every write")


#: Defects of the writers' stores, by name.
DEFECTS: dict[str, Callable[[Store], Any]] = {
    "unfenced": _Unfenced,
    "early": _Early,
    "splitting": _Splitting,
    "refusing": _Refusing,
}
