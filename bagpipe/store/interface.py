"""Interface of the embedding store: batched, ids in, row records out. One conformance suite covers all stores.

A *row record* is ``[weights | optimizer state]`` of one id: a fixed-width vector of the table's words (`RowType`).
A store has no initial values: a row that was never written is not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.row_sums import RowSums
from bagpipe.types.schema import RowSchema

__all__ = ["HELD_ID_BYTES", "DeleteRequest", "ReadResult", "Rows", "Store", "StoreStatistics", "WriteRequest"]

#: Bytes of the ids of a group of tables (`Store.ids_by_table`), unless it is one table.
HELD_ID_BYTES = 512 << 20

Rows = NDArray[Any]  # float32, float64, or uint16 for half types, [num_rows, row_width]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Rows of one table, in the order of the requested ids.

    Attributes:
        rows: ``[n, row_width]``, words of the table; zero where not found.
        found: bool ``[n]``.
        checks: uint64 ``[n]``, check words of the rows (`bagpipe.store.row_checksum`); zero where not found.
    """

    rows: Rows
    found: NDArray[np.bool_]
    checks: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Rows of one table to write.

    Attributes:
        table: number of the table.
        ids: int64 ``[n]``, distinct.
        rows: ``[n, row_width]``.
        replaced: uint64 ``[n]``, `ReadResult.checks` of the stored rows that these replace; zero for new rows. None:
            the writer does not know them, and the write does not count in `Store.sum_changes`.
    """

    table: int
    ids: NDArray[np.int64]
    rows: Rows
    replaced: NDArray[np.uint64] | None = None


@dataclass(frozen=True, slots=True)
class DeleteRequest:
    """Rows of one table to delete.

    Attributes:
        table: number of the table.
        ids: int64 ``[n]``, distinct; those without a row are passed over.
    """

    table: int
    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """Totals since the store was opened. Bytes are those on the wire, 0 for an in-memory store.

    Attributes:
        rows_deleted: rows that `Store.delete_many` found and removed.
        moved, asked: MOVED and ASK redirections of a cluster.
        failovers: masters of a cluster that were replaced after their connection was lost.
    """

    rows_read: int = 0
    rows_found: int = 0
    rows_written: int = 0
    rows_deleted: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    moved: int = 0
    asked: int = 0
    failovers: int = 0


@runtime_checkable
class Store(Protocol):
    """A namespace of rows. Context manager: constructors only validate, `__enter__` connects.

    One thread can read while another writes; two threads must not read, or write, at the same time.
    `check` compares the namespace's schema record and creates nothing; `claim` writes the record if there is none.
    `reloads`: the caller reloads the rows of a server that has lost its data, so such a server is not refused.
    `resets`: the caller removes all rows, so only a record that places them on other servers is refused.
    """

    schema: RowSchema

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """True if the namespace holds a matching schema record on any of its servers, False if it holds none.

        Raises:
            InputError: the record differs (names both values), or a server can evict rows or refuses the user.
        """
        ...

    def claim(self, *, reloads: bool = False) -> bool:
        """Write the schema record if the namespace has none. True if this call created it, so no row exists."""
        ...

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """Rows of one table, given by its number in the schema."""
        ...

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """`read` for several tables in one exchange; results in the order of the requests.

        Raises:
            StoreError: a server failed, sent an unexpected reply, or missed the deadline.
        """
        ...

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """Write rows of one table; returns when the store has acknowledged them."""
        ...

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """`write` for several tables in one exchange. Idempotent.

        Raises:
            StoreError: as for `read_many`; the rows may or may not have been written.
        """
        ...

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        """Remove rows of several tables in one exchange, or a few if there are many. Idempotent.

        Returns when every server has acknowledged. Ids without a row are passed over. Call from the writing thread.

        Raises:
            StoreError: as for `read_many`; the rows may or may not have been removed.
            ValueError: an id appears twice among the requests for one table.
        """
        ...

    def fence(self, fence: Fence) -> None:
        """Fence all further writes and deletions: every group is logged, and rejected once another job owns its bucket.

        The writer's logs must exist and be empty (`Ledger.acquire` or `begin`). Without a fence a store logs nothing.
        With one, `write_many` and `delete_many` also raise `FencedError`, and `RolledBackError` if the store has lost
        groups of this writer that it had acknowledged. The log of a deletion names the ids asked for.
        """
        ...

    def rotate(self) -> NDArray[np.int64]:
        """Close this writer's logs and open those of the next epoch. Call from the writing thread, between writes.

        Returns:
            int64 ``[num_buckets]``: groups in each closed log.

        Raises:
            FencedError, RolledBackError: as for `write_many`, but checked for every bucket.
            ValueError: there is no fence.
        """
        ...

    def reset(self, token: str) -> None:
        """Acquire the namespace for `token` and clear it (`Ledger.clear`), whatever schema its record states.

        Raises:
            FencedError: another job has acquired it meanwhile.
            InputError: as `check` with ``resets``.
        """
        ...

    def ledger(self) -> Ledger:
        """The ledger of this namespace, with its own connections; not entered yet.

        It acts for the token of this store's fence, if there is one, until it acquires the namespace for another.
        """
        ...

    def ids(self, table: int) -> NDArray[np.int64]:
        """All ids of a table that have a row, ascending. O(rows of the namespace) time, 8 B per row of the table."""
        ...

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """`ids` of several distinct tables, in groups of consecutive tables whose ids are held in memory together.

        O(rows of the namespace) time for each group, not for each table. A group has at least one table, and more only
        if their ids take no more than `HELD_ID_BYTES`.
        """
        ...

    def sum_changes(self) -> RowSums:
        """The change of each bucket's sum of check words by this store's acknowledged writes and deletions.

        Counts the writes that name what they replaced. They changed the sums by this much if the rows they replaced
        were those. A deletion takes out the words that its rows had just before. Call from the writing thread, between
        writes.
        """
        ...

    def statistics(self) -> StoreStatistics: ...
