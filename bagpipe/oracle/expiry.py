"""Expiry: rows that no batch has used for long are deleted, and begin anew when their ids come again.

    batch ──clock──> RowLifetimes, every so many batches ──> expired rows of each table ─┐
      │  (RowAdmission forgets their uses, and admits)                                   ├──> the batch
      └──ids of each table──> RowLifetimes.use ──> is_born of each occurrence ───────────┘

Batches come in order, from the first one on. Which rows are born and which expire is a function of the batches so far
alone: not of ranks, caches or windows. The planner takes both from the batch. Rows expire before batches whose number
is a multiple of `ExpiryRules.every`: there evictions wait for the update of the batch before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from bagpipe.errors import InputError
from bagpipe.oracle.lifetimes import RowLifetimes
from bagpipe.oracle.plan import RowList
from bagpipe.oracle.table_rows import TableRows, check_bounds, features_of
from bagpipe.types.batch import Batch, ExpiredRows
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID, DataSchema

__all__ = ["CLOCKS", "ExpiryRules", "ExpiryUnit", "RowExpiry"]

#: Units of the clock.
ExpiryUnit: TypeAlias = Literal["examples", "steps", "days"]
_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryRules:
    """The limits of the tables whose rows expire.

    Attributes:
        limits: more than 0, by name of the data's table; rows of tables that are not named do not expire.
        unit: of the limits.
        every: batches from one expiry to the next.
    """

    limits: Mapping[str, float]
    unit: ExpiryUnit
    every: int = 1

    def check(self, schema: DataSchema) -> None:
        """Check the tables.

        Raises:
            InputError: a table that the data does not have.
        """
        known = [table.name for table in schema.tables]
        unknown = [name for name in self.limits if name not in known]
        if unknown:
            raise InputError(f"data.expire_after_by_table names table {unknown[0]!r}, the data has {', '.join(known)}")


class _Examples:
    """Clock of the examples in the batches before one."""

    def __init__(self) -> None:
        self._examples = 0

    def __call__(self, batch: Batch) -> float:
        before = self._examples
        self._examples += batch.num_examples
        return before


class _Days:
    """Clock of the latest time of the examples so far, in days."""

    def __init__(self) -> None:
        self._latest_s: int | None = None

    def __call__(self, batch: Batch) -> float:
        if batch.times_s is None:
            raise InputError("data.expire_unit days needs a clock: expected a time of every example, got none")
        if batch.num_examples:
            latest_s = int(batch.times_s.max())
            self._latest_s = latest_s if self._latest_s is None else max(self._latest_s, latest_s)
        return (self._latest_s or 0) / _DAY_S


#: Unit -> a clock: called with every batch, in order; never goes back.
CLOCKS: Mapping[ExpiryUnit, Callable[[], Callable[[Batch], float]]] = {
    "examples": _Examples,
    "steps": lambda: lambda batch: batch.index,
    "days": _Days,
}


class RowExpiry:
    """Follows the rows of batches, which come in order, from the first one on. `begin`, then `follow`, for each.

    Args:
        schema: columns of the batches, after the admission of rows.
        rules: which rows expire.
    """

    def __init__(self, schema: DataSchema, rules: ExpiryRules) -> None:
        self._features = tuple(features_of(schema, table) for table in schema.tables)
        defaults = [
            (UNBOUNDED_DEFAULT_ID if table.rows is None else table.rows) if table.absent == "default" else None
            for table in schema.tables
        ]
        self._tables = schema.tables
        self._lifetimes = RowLifetimes(
            [table.num_ids for table in schema.tables],
            [rules.limits.get(table.name) for table in schema.tables],
            defaults,
            every=rules.every,
        )
        self._clock = CLOCKS[rules.unit]()

    @property
    def num_alive(self) -> int:
        """Live rows of tables whose rows expire."""
        return self._lifetimes.num_alive

    def know(self, rows: RowList) -> None:
        """Rows, by number of the data's table, that are there before the first batch: as old as the job."""
        self._lifetimes.know(rows)

    def begin(self, batch: Batch) -> RowList | None:
        """The rows that expire before a batch, by number of the data's table; None: none expires.

        Raises:
            InputError: the clock needs times, and the batch has none.
        """
        self._lifetimes.begin(self._clock(batch))
        expired = self._lifetimes.pop_expired()
        return expired if len(expired) else None

    def follow(self, batch: Batch, expired: RowList | None) -> Batch:
        """Note the uses of a batch whose rows are admitted. Returns it with the rows that are born and that expired.

        Args:
            batch: the batch.
            expired: the result of `begin`.

        Raises:
            InputError: an id outside its table.
        """
        found = TableRows.of(batch, self._features)
        for number, table in enumerate(self._tables):
            if table.num_ids is not None:
                check_bounds(batch.index, table.name, found.ids_of(number), table.num_ids)
        is_new = self._lifetimes.use(found.rows)
        is_born = np.zeros(batch.values.shape[0], dtype=np.bool_)
        for _, span, of_ids in found.of_occurrences(is_new):
            is_born[span] = of_ids
        if expired is None:
            return dataclasses.replace(batch, is_born=is_born)
        bounds = itertools.pairwise(expired.table_offsets.tolist())
        gone = tuple(
            ExpiredRows(features=own, ids=expired.ids[start:stop])
            for own, (start, stop) in zip(self._features, bounds, strict=True)
        )
        return dataclasses.replace(batch, is_born=is_born, expired=gone)
