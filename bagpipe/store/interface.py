"""The embedding store's interface: batched, ids in, row records out. One conformance suite covers every implementation.

A *row record* is ``[weights | optimizer state]`` of one id: a fixed-width vector of the schema's words.
A store knows nothing of initial values: a row never written is simply not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.types.schema import RowSchema

__all__ = ["ReadResult", "Rows", "Store", "StoreStatistics", "WriteRequest"]

Rows = NDArray[Any]  # float32, float64, or uint16 for half types, [num_rows, row_width]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Rows of one table in the order of the ids asked for.

    Attributes:
        rows: ``[n, row_width]``, words of the schema; rows that were not found are zero.
        found: bool ``[n]``.
    """

    rows: Rows
    found: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Rows of one table to write: ids int64 ``[n]`` (distinct), rows ``[n, row_width]``."""

    table: int
    ids: NDArray[np.int64]
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """Totals since the store was opened; bytes are those of the wire (0 for an in-memory store).

    Attributes:
        moved, asked: commands that a cluster's node sent elsewhere, for good and once.
        failovers: times that another node of a cluster took over from one whose connection was lost.
    """

    rows_read: int = 0
    rows_found: int = 0
    rows_written: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    moved: int = 0
    asked: int = 0
    failovers: int = 0


@runtime_checkable
class Store(Protocol):
    """A namespace of rows. Use as a context manager: constructors only check, `__enter__` connects.

    One thread may read while another writes; two threads must not read (or write) at once.
    `check` compares the namespace's schema record and creates nothing; `claim` writes the record if there is none.
    Both take `reloads`: the caller will load the rows of a server that is back without its data, so that is no refusal.
    """

    schema: RowSchema

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self, *, reloads: bool = False) -> bool:
        """True if the namespace holds a matching schema record (on any of its servers), False if it holds none.

        Raises:
            InputError: the record differs (names both values), or the server can drop rows, or refuses us.
        """
        ...

    def claim(self, *, reloads: bool = False) -> bool:
        """Write the schema record if the namespace has none. True if this call created it (so no row exists yet)."""
        ...

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """Rows of one table (table number of the schema)."""
        ...

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """`read` for several tables in one exchange; results in the order of the requests.

        Raises:
            StoreError: the server failed, answered something else, or not within the deadline.
        """
        ...

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """Write absolute rows of one table; returns when the store has acknowledged them."""
        ...

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """`write` for several tables in one exchange. Idempotent: writing the same rows again changes nothing.

        Raises:
            StoreError: as for `read_many`; the rows may or may not have been written.
        """
        ...

    def fence(self, fence: Fence) -> None:
        """From now on write as this writer: every group is logged, and refused once another job owns its bucket.

        A store that was given no fence writes without, and logs nothing. The writer's logs exist and are empty
        (`Ledger.acquire` or `begin`). Then `write_many` also raises `FencedError`, and `RolledBackError` if the store
        has lost groups of this writer that it had acknowledged.
        """
        ...

    def rotate(self) -> NDArray[np.int64]:
        """Close this writer's logs and go on with those of the next epoch. By the thread that writes, between writes.

        Returns:
            int64 ``[num_buckets]``: groups in each log that was closed.

        Raises:
            FencedError, RolledBackError: as for `write_many`; checked for every bucket, written or not.
            ValueError: there is no fence.
        """
        ...

    def ledger(self) -> Ledger:
        """Administration of this namespace's fence, with connections of its own; not entered yet.

        It acts for the token that this store was fenced with, if it was, until it acquires the buckets for another.
        """
        ...

    def ids(self, table: int) -> NDArray[np.int64]:
        """All ids of a table that have a row, ascending. O(rows of the table) time and 8 B each; not for hot paths."""
        ...

    def statistics(self) -> StoreStatistics: ...
