"""`SavingsCounter`: rows that thresholds of uses and limits of age would save, counted in one pass over a log.

batch ──rows of the data's tables, uses──> UseCounts ───────────────────> per threshold: rows created, default reads
                          └──> RowLifetimes, one for each limit ────────> per limit: rows alive, deleted, born anew

The counts are those of a job with `data.min_uses` or `data.expire_after`, since the same parts decide there. Limits are
counted without thresholds and the other way round. Memory: 4 B for each row of bounded tables, else 50 to 100 B for
each row seen; the same for each limit, of live rows, and up to 16 B a live row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.expiry import CLOCKS, ExpiryUnit
from bagpipe.oracle.lifetimes import RowLifetimes
from bagpipe.oracle.plan import RowList
from bagpipe.oracle.table_rows import TableRows, features_of
from bagpipe.oracle.use_counts import make_counts
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema
from data.replay.records import LimitCounts, LimitSavings, Savings, ThresholdCounts, ThresholdSavings

__all__ = ["SavingsCounter", "Tried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The thresholds and limits to count.

    Attributes:
        thresholds: values of `data.min_uses`, from 1 to 2**31 - 1.
        limits: values of `data.expire_after`, above 0, in `unit`.
        unit, every: as `data.expire_unit` and `data.expire_every`.
    """

    thresholds: tuple[int, ...] = ()
    limits: tuple[float, ...] = ()
    unit: ExpiryUnit = "examples"
    every: int = 1


class SavingsCounter:
    """Counts batches, which come in order, from the first one on.

    Args:
        schema: columns of the batches.
        row_bytes: by table of the data, bytes of a stored row.
        tried: what to count.
    """

    def __init__(self, schema: DataSchema, row_bytes: Mapping[str, int], tried: Tried) -> None:
        self._names = tuple(table.name for table in schema.tables)
        self._features = tuple(features_of(schema, table) for table in schema.tables)
        self._row_bytes = np.array([row_bytes[name] for name in self._names], dtype=np.int64)
        self._tried = tried
        self._thresholds = np.array(tried.thresholds, dtype=np.int64)[:, None]
        self._counts = make_counts([table.rows for table in schema.tables])
        self._clock = CLOCKS[tried.unit]()
        num_tables = len(self._names)
        self._rows, self._uses = np.zeros((2, num_tables), dtype=np.int64)
        # By threshold and table.
        self._created, self._default_uses = np.zeros((2, len(tried.thresholds), num_tables), dtype=np.int64)
        table_rows = [table.num_ids for table in schema.tables]
        self._lives = [_Lives(table_rows, limit, tried.every, self._row_bytes) for limit in tried.limits]

    def add(self, batch: Batch) -> None:
        """Count the next batch, whose ids are inside their tables.

        Raises:
            InputError: limits are in days, and the batch has no times.
        """
        found = TableRows.of(batch, self._features)
        offsets, uses = found.rows.table_offsets, found.uses
        total = self._counts.add(found.rows, uses)
        is_below = total < self._thresholds
        self._rows += _by_table(total == uses, offsets)
        self._uses += _by_table(uses, offsets)
        self._created += _by_table(~is_below & (total - uses < self._thresholds), offsets)
        self._default_uses += _by_table(np.where(is_below, uses, 0), offsets)
        clock = self._clock(batch) if self._lives else 0
        for lives in self._lives:
            lives.take(clock, found.rows)

    def found(self) -> Savings:
        """The counts so far."""
        return Savings(
            thresholds=tuple(
                self._threshold(min_uses, created, default_uses)
                for min_uses, created, default_uses in zip(
                    self._tried.thresholds, self._created, self._default_uses, strict=True
                )
            ),
            limits=tuple(
                LimitSavings(
                    expire_after=limit,
                    unit=self._tried.unit,
                    every=self._tried.every,
                    total=lives.total(self._rows),
                    tables=dict(zip(self._names, lives.tables(self._rows), strict=True)),
                )
                for limit, lives in zip(self._tried.limits, self._lives, strict=True)
            ),
        )

    def _threshold(
        self, min_uses: int, created: NDArray[np.int64], default_uses: NDArray[np.int64]
    ) -> ThresholdSavings:
        def counts(tables: slice) -> ThresholdCounts:
            rows, row_bytes, uses = created[tables], self._row_bytes[tables], int(self._uses[tables].sum())
            num_bytes = int(rows @ row_bytes)
            return ThresholdCounts(
                rows=int(rows.sum()),
                rows_saved=_saved(int(rows.sum()), int(self._rows[tables].sum())),
                bytes=num_bytes,
                bytes_saved=_saved(num_bytes, int(self._rows[tables] @ row_bytes)),
                uses=uses,
                default_uses=int(default_uses[tables].sum()),
                default_share=int(default_uses[tables].sum()) / uses if uses else 0.0,
            )

        return ThresholdSavings(
            min_uses=min_uses,
            total=counts(slice(None)),
            tables={name: counts(slice(number, number + 1)) for number, name in enumerate(self._names)},
        )


class _Lives:
    """Counts the lives of rows with one limit."""

    def __init__(self, table_rows: list[int | None], limit: float, every: int, row_bytes: NDArray[np.int64]) -> None:
        num_tables = len(table_rows)
        self._lifetimes = RowLifetimes(table_rows, [limit] * num_tables, [None] * num_tables, every=every)
        self._row_bytes = row_bytes
        self._births, self._deleted, self._at_most = np.zeros((3, num_tables), dtype=np.int64)
        self._rows_at_most = self._bytes_at_most = 0

    def take(self, clock: float, rows: RowList) -> None:
        self._lifetimes.begin(clock)
        self._deleted += np.diff(self._lifetimes.pop_expired().table_offsets)
        self._births += _by_table(self._lifetimes.use(rows), rows.table_offsets)
        alive = self._births - self._deleted
        np.maximum(self._at_most, alive, out=self._at_most)
        self._rows_at_most = max(self._rows_at_most, int(alive.sum()))
        self._bytes_at_most = max(self._bytes_at_most, int(alive @ self._row_bytes))

    def total(self, distinct: NDArray[np.int64]) -> LimitCounts:
        """Of all tables. `distinct`: rows of each table that batches have used."""
        births, deleted = int(self._births.sum()), int(self._deleted.sum())
        return LimitCounts(
            rows_at_end=births - deleted,
            rows_at_most=self._rows_at_most,
            rows_deleted=deleted,
            rows_born_anew=births - int(distinct.sum()),
            bytes_at_most=self._bytes_at_most,
        )

    def tables(self, distinct: NDArray[np.int64]) -> list[LimitCounts]:
        """Of each table."""
        return [
            LimitCounts(
                rows_at_end=births - deleted,
                rows_at_most=at_most,
                rows_deleted=deleted,
                rows_born_anew=births - rows,
                bytes_at_most=at_most * row_bytes,
            )
            for births, deleted, at_most, rows, row_bytes in np.stack(
                [self._births, self._deleted, self._at_most, distinct, self._row_bytes], axis=1
            ).tolist()
        ]


def _by_table(values: NDArray[np.int64] | NDArray[np.bool_], table_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 ``[..., tables]``: sums of ``[..., len(rows)]`` values over the rows of each table."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1), dtype=np.int64)
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return np.diff(sums.take(table_offsets, axis=-1), axis=-1)


def _saved(kept: int, whole: int) -> float:
    return 1 - kept / whole if whole else 0.0
