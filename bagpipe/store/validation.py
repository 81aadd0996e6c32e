"""Argument checks of every store, made before anything is sent or changed.

A wrong shape or a duplicate id is a bug of the caller, hence ValueError and not `InputError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import DeleteRequest, Rows, WriteRequest
from bagpipe.types.schema import RowSchema

__all__ = ["check_deletion", "check_read", "check_write", "row_dtype"]


def row_dtype(schema: RowSchema, table: int) -> np.dtype[np.generic]:
    """Words of a table's stored records: little-endian float32 or float64; uint16 for half types, as raw bits."""
    return np.dtype(schema.row_type_of(table).word)


def check_read(schema: RowSchema, table: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids, contiguous.

    Raises:
        ValueError: an unknown table, or `ids` is not int64 ``[n]``.
    """
    if not 0 <= table < len(schema.tables):
        raise ValueError(f"table number must be in [0, {len(schema.tables)}), got {table}")
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"ids of table {table} must be int64 [n], got {ids.dtype} {list(ids.shape)}")
    return np.ascontiguousarray(ids)


def check_write(schema: RowSchema, request: WriteRequest) -> tuple[NDArray[np.int64], Rows]:
    """The request's ids and rows, contiguous.

    Raises:
        ValueError: as for `check_read`; or rows or replaced check words of a wrong shape or dtype; or a duplicate id.
    """
    ids = check_read(schema, request.table, request.ids)
    expected, dtype = (ids.shape[0], schema.row_width(request.table)), row_dtype(schema, request.table)
    if request.rows.shape != expected or request.rows.dtype != dtype:
        raise ValueError(
            f"rows of table {request.table} must be {dtype} {list(expected)}, "
            f"got {request.rows.dtype} {list(request.rows.shape)}"
        )
    replaced = request.replaced
    if replaced is not None and (replaced.dtype != np.uint64 or replaced.shape != ids.shape):
        raise ValueError(
            f"replaced check words of table {request.table} must be uint64 {list(ids.shape)}, "
            f"got {replaced.dtype} {list(replaced.shape)}"
        )
    _check_distinct(ids, f"a write to table {request.table}")
    return ids, np.ascontiguousarray(request.rows)


def check_deletion(schema: RowSchema, requests: Sequence[DeleteRequest]) -> list[tuple[int, NDArray[np.int64]]]:
    """The tables of the requests, each once, and their ids, contiguous.

    Raises:
        ValueError: as for `check_read`; or an id twice in a table, in one request or in several.
    """
    parts: dict[int, list[NDArray[np.int64]]] = {}
    for request in requests:
        parts.setdefault(request.table, []).append(check_read(schema, request.table, request.ids))
    deletions = [(table, ids[0] if len(ids) == 1 else np.concatenate(ids)) for table, ids in parts.items()]
    for table, ids in deletions:
        _check_distinct(ids, f"a deletion from table {table}")
    return deletions


def _check_distinct(ids: NDArray[np.int64], where: str) -> None:
    # Plans list ids in ascending order, so the cheap test usually suffices.
    if not (ids[1:] > ids[:-1]).all():
        ordered = np.sort(ids)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            raise ValueError(f"id {ordered[twice[0]]} appears twice in {where}")
