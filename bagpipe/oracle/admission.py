"""Admission: a row is created at its so-many-th use; earlier uses read a default row of the table, or a zero vector.

    batch ──ids of each table, uses──> UseCounts ──fewer than min_uses so far──> the default row's id, or no id
                                                 ──enough──────────────────────> the id

A *use* is an occurrence of the id in a bag, in any feature of the data's table. Uses are counted in the order of the
global batches. The batch in which a row's count reaches `min_uses` admits it, for all of its occurrences there. So the
result is a function of the batches so far alone: not of ranks, caches or windows. What follows sees ordinary batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.plan import RowList
from bagpipe.oracle.table_rows import TableRows, check_bounds, features_of
from bagpipe.oracle.use_counts import make_counts
from bagpipe.types.batch import Batch
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID, Absent, DataSchema

__all__ = ["AdmissionRules", "RowAdmission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """Which tables admit rows by their uses, and how.

    Attributes:
        min_uses: at least 2, by name of the data's table; tables that are not named admit every row.
        absent: what a row that is not admitted reads: default or zero.
        sketch_cells: cells of a row of each table's sketch, a power of two; 0: counts are exact.
    """

    min_uses: Mapping[str, int]
    absent: Absent = "default"
    sketch_cells: int = 0

    def schema(self, schema: DataSchema) -> DataSchema:
        """The columns of the batches: the tables say what absent rows read.

        Raises:
            InputError: a table that the data does not have, or whose bags cannot leave ids out.
        """
        known = [table.name for table in schema.tables]
        unknown = [name for name in self.min_uses if name not in known]
        if unknown:
            raise InputError(f"data.min_uses_by_table names table {unknown[0]!r}, the data has {', '.join(known)}")
        for table in schema.tables:
            if self.absent == "zero" and table.name in self.min_uses and table.pooling != "sum":
                raise InputError(
                    f"data.default_row zero leaves ids out of bags, so table {table.name!r} must be sum-pooled, got "
                    f"{table.pooling}: use trained"
                )
        tables = (
            dataclasses.replace(table, absent=self.absent) if table.name in self.min_uses else table
            for table in schema.tables
        )
        return dataclasses.replace(schema, tables=tuple(tables))


@dataclass(frozen=True, slots=True)
class _Table:
    """A table that admits rows.

    Attributes:
        features: numbers of its features.
        rows: ids of the data lie in ``[0, rows)``; None: any but the default row's.
        default_id: of its default row.
    """

    name: str
    features: tuple[int, ...]
    min_uses: int
    rows: int | None
    default_id: int


class RowAdmission:
    """Admits the rows of batches, which come in order, from the first one on.

    Args:
        schema: columns of the batches, before `AdmissionRules.schema` or after it.
        rules: which rows are admitted.
    """

    def __init__(self, schema: DataSchema, rules: AdmissionRules) -> None:
        self._tables = tuple(
            _Table(
                name=table.name,
                features=features_of(schema, table),
                min_uses=rules.min_uses[table.name],
                rows=table.rows,
                default_id=UNBOUNDED_DEFAULT_ID if table.rows is None else table.rows,
            )
            for table in schema.tables
            if table.name in rules.min_uses
        )
        self._numbers = [number for number, table in enumerate(schema.tables) if table.name in rules.min_uses]
        self._leaves_out = rules.absent == "zero"
        self._min_uses = np.array([table.min_uses for table in self._tables], dtype=np.int64)
        self._uses = make_counts([table.rows for table in self._tables], rules.sketch_cells)

    def check(self, batch: Batch) -> Batch:
        """The batch, unchanged and not counted.

        Raises:
            InputError: an id outside its table, or that of the default row.
        """
        offsets = batch.feature_offsets()
        for table in self._tables:
            for feature in table.features:
                _check_ids(batch.index, table, batch.values[offsets[feature] : offsets[feature + 1]])
        return batch

    def forget(self, expired: RowList) -> None:
        """Count the uses of rows from 0 again. `expired`: rows by number of the data's table; counts are exact."""
        rows = self._of_tables(expired)
        if len(rows):
            self._uses.forget(rows)

    def know(self, rows: RowList) -> None:
        """Admit rows, by number of the data's table, that are there before the first batch."""
        rows = self._of_tables(rows)
        if len(rows):
            self._uses.add(rows, np.repeat(self._min_uses, np.diff(rows.table_offsets)))

    def _of_tables(self, rows: RowList) -> RowList:
        """Rows of the tables that admit rows, without default rows."""
        parts = []
        for number, table in zip(self._numbers, self._tables, strict=True):
            ids = rows.ids[rows.table_offsets[number] : rows.table_offsets[number + 1]]
            parts.append(ids[ids != table.default_id])
        table_offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([ids.shape[0] for ids in parts], out=table_offsets[1:])
        return RowList(table_offsets=table_offsets, ids=np.concatenate([np.empty(0, np.int64), *parts]))

    def admit(self, batch: Batch) -> Batch:
        """Count a batch. Returns it with the ids of its admitted rows alone.

        A row that is admitted stays so until it expires, and its next use is that of its id. The default row's is taken
        to be the next batch, as rare ids use it all the time.

        Raises:
            InputError: see `check`.
        """
        self.check(batch)
        found = TableRows.of(batch, [table.features for table in self._tables])
        total = self._uses.add(found.rows, found.uses)
        is_admitted = total >= np.repeat(self._min_uses, np.diff(found.rows.table_offsets))
        if is_admitted.all():
            return batch
        is_kept = np.ones(batch.values.shape[0], dtype=np.bool_)
        values = batch.values.copy()
        for table, span, kept in found.of_occurrences(is_admitted):
            is_kept[span] = kept
            values[span][~kept] = self._tables[table].default_id
        if self._leaves_out:
            return _without(batch, is_kept)
        next_use = None if batch.next_use is None else np.where(is_kept, batch.next_use, np.int32(batch.index + 1))
        return dataclasses.replace(batch, values=values, next_use=next_use)


def _check_ids(batch_index: int, table: _Table, ids: NDArray[np.int64]) -> None:
    if table.rows is not None:
        check_bounds(batch_index, table.name, ids, table.rows)
    elif ids.shape[0] and int(ids.min()) == table.default_id:
        raise InputError(
            f"batch {batch_index}, table {table.name!r}: id {table.default_id} is that of the default row of "
            "data.min_uses: expected any other"
        )


def _without(batch: Batch, is_kept: NDArray[np.bool_]) -> Batch:
    """The batch without some of its ids."""
    kept_before = np.zeros(is_kept.shape[0] + 1, dtype=np.int64)
    np.cumsum(is_kept, out=kept_before[1:])
    ends = np.cumsum(batch.lengths, dtype=np.int64).reshape(batch.lengths.shape)
    lengths = kept_before.take(ends) - kept_before.take(ends - batch.lengths)
    return dataclasses.replace(
        batch,
        values=batch.values[is_kept],
        lengths=lengths.astype(np.int32),
        weights=None if batch.weights is None else batch.weights[is_kept],
        next_use=None if batch.next_use is None else batch.next_use[is_kept],
    )
