"""`Region`: a part of shared memory that holds one exchange with the store: tables, ids, check words, flags and rows.

    entries  int64 [k, 3]   table, number of rows, whether check words are known (writes)
    ids      int64 [n]      of all entries, in their order
    checks   uint64 [n]     read: check words; write: those of the rows that are replaced
    found    bool [n]       read
    rows     one block per entry, [number of rows, row_width]

Each array begins at a multiple of 64 bytes. Both processes compute the places from the entries, so a message says only
how many entries there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import ReadResult, Rows, WriteRequest
from bagpipe.store.validation import row_dtype
from bagpipe.types.schema import RowSchema

__all__ = ["Layout", "Piece", "Region"]

_ALIGN_BYTES = 64
_ENTRY_WORDS = 3
#: Bytes of an entry and of what aligns its rows; of what a row has beside itself.
_ENTRY_BYTES = 8 * _ENTRY_WORDS + _ALIGN_BYTES
_ID_BYTES = 8 + 8 + 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``[start, stop)`` of request number `request`."""

    request: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """Its rows in the arrays of the request."""
        return slice(self.start, self.stop)


class Layout:
    """Sizes of the rows of a schema.

    Args:
        schema: of the store.
        region_bytes: size of a region.

    Raises:
        ValueError: a region does not hold one row of each table.
    """

    def __init__(self, schema: RowSchema, region_bytes: int) -> None:
        numbers = range(len(schema.tables))
        self.region_bytes = region_bytes
        self.dtypes = [row_dtype(schema, table) for table in numbers]
        self.widths = [schema.row_width(table) for table in numbers]
        self.row_bytes = np.array([schema.row_bytes(table) for table in numbers], np.int64)
        self._capacity = region_bytes - 4 * _ALIGN_BYTES  # the arrays before the rows are aligned too
        widest = max(self.row_bytes.tolist(), default=0)
        if _ENTRY_BYTES + _ID_BYTES + widest > self._capacity:
            raise ValueError(f"a region of {region_bytes} bytes holds no row of {widest} bytes")

    def exchanges(self, tables: Sequence[int], counts: Sequence[int]) -> Iterator[list[Piece]]:
        """The requests in exchanges that fit into a region, in order. Nearly always there is one.

        Args:
            tables, counts: of each request, its table and number of rows. If there are several exchanges, a request
                without rows is in none of them.
        """
        row_bytes = self.row_bytes[list(tables)] if tables else np.zeros(0, np.int64)
        needed = len(counts) * _ENTRY_BYTES + int(((row_bytes + _ID_BYTES) * np.asarray(counts, np.int64)).sum())
        if needed <= self._capacity:
            yield [Piece(request, 0, count) for request, count in enumerate(counts)]
            return
        pieces: list[Piece] = []
        left = self._capacity
        for request, (each, count) in enumerate(zip((row_bytes + _ID_BYTES).tolist(), counts, strict=True)):
            start = 0
            while start < count:
                stop = min(count, start + (left - _ENTRY_BYTES) // each)
                if stop > start:
                    pieces.append(Piece(request, start, stop))
                    left -= _ENTRY_BYTES + (stop - start) * each
                    start = stop
                else:
                    yield pieces
                    pieces, left = [], self._capacity
        if pieces:
            yield pieces


class Region:
    """The arrays of one exchange.

    Args:
        layout: of the store's schema.
        memory: uint8 ``[region_bytes]``.
        entries: to write: table, number of rows, whether check words are known; or the number of those that the other
            process wrote.
    """

    def __init__(
        self, layout: Layout, memory: NDArray[np.uint8], entries: int | Sequence[tuple[int, int, bool]]
    ) -> None:
        num_entries = entries if isinstance(entries, int) else len(entries)
        entry_bytes = 8 * _ENTRY_WORDS * num_entries
        at = _aligned(entry_bytes)
        places = memory[:entry_bytes].view(np.int64).reshape(num_entries, _ENTRY_WORDS)
        if not isinstance(entries, int) and entries:
            places[:] = entries
        self.entries: list[list[int]] = places.tolist()
        num_rows = sum(count for _, count, _ in self.entries)
        self.ids: NDArray[np.int64] = memory[at : at + 8 * num_rows].view(np.int64)
        at += _aligned(8 * num_rows)
        self.checks: NDArray[np.uint64] = memory[at : at + 8 * num_rows].view(np.uint64)
        at += _aligned(8 * num_rows)
        self.found: NDArray[np.bool_] = memory[at : at + num_rows].view(np.bool_)
        at += _aligned(num_rows)
        self.memory, self._layout, self._rows_at = memory, layout, at

    def rows(self) -> Iterator[Rows]:
        """The rows of each entry, ``[number of rows, row_width]``."""
        layout, at = self._layout, self._rows_at
        for table, count, _ in self.entries:
            num_bytes = count * int(layout.row_bytes[table])
            rows = self.memory[at : at + num_bytes].view(layout.dtypes[table])
            yield rows.reshape(count, layout.widths[table])
            at += _aligned(num_bytes)

    def spans(self) -> Iterator[slice]:
        """The place of each entry in `ids`, `checks` and `found`."""
        start = 0
        for _, count, _ in self.entries:
            yield slice(start, start + count)
            start += count

    def reads(self) -> list[tuple[int, NDArray[np.int64]]]:
        """The exchange as arguments of `Store.read_many`."""
        return [(table, self.ids[span]) for (table, _, _), span in zip(self.entries, self.spans(), strict=True)]

    def results(self) -> list[ReadResult]:
        """The results of a read; views of the region."""
        return [
            ReadResult(rows, self.found[span], self.checks[span])
            for rows, span in zip(self.rows(), self.spans(), strict=True)
        ]

    def put_results(self, results: Sequence[ReadResult]) -> None:
        """Write the results of a read."""
        for result, rows, span in zip(results, self.rows(), self.spans(), strict=True):
            rows[:], self.found[span], self.checks[span] = result.rows, result.found, result.checks

    def writes(self) -> list[WriteRequest]:
        """The exchange as arguments of `Store.write_many`; views of the region."""
        return [
            WriteRequest(table, self.ids[span], rows, self.checks[span] if is_known else None)
            for (table, _, is_known), rows, span in zip(self.entries, self.rows(), self.spans(), strict=True)
        ]

    def put_writes(self, requests: Sequence[WriteRequest]) -> None:
        """Write what is to be written."""
        for request, rows, span in zip(requests, self.rows(), self.spans(), strict=True):
            rows[:], self.ids[span] = request.rows, request.ids
            if request.replaced is not None:
                self.checks[span] = request.replaced


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
