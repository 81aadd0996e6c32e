"""`ScannedLog`: a log cut into batches and read once: its length, its batch sizes, its rows.

loader ──first pass──> RowCounter: counts rows once for all batch sizes ──numbers──> RowBatchFile, for baselines
                  ├──> SavingsCounter: thresholds and limits, if any are tried
                  └──> ScannedLog ──read()──> further passes, one per oracle setting
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.loader import open_loader
from data.replay.log_tables import LogTables
from data.replay.row_batch_file import RowBatches, RowBatchFile
from data.replay.row_counter import RowCounter
from data.replay.savings import SavingsCounter
from data.source import Source

__all__ = ["EXPIRED", "ScannedLog", "Watch", "scan"]

#: Name of the file of the rows that expire before each batch.
EXPIRED = "expired"


class Watch(Protocol):
    """Shows the progress of a pass; yields the batches unchanged."""

    def __call__(self, batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScannedLog:
    """A log cut into batches, after its first pass.

    Attributes:
        config: how it is read.
        source: its source.
        tables: its tables, numbered.
        examples, batches, ids: counts of the whole log.
        first_touches: int64 by table: distinct rows.
        births: int64 by table: rows that begin: distinct ones, and those used again after they expired.
        rows_deleted: that expire.
        table_of_row: int16 by row number.
        largest: unique rows of the largest batch. largest_at: the number of that batch.
        row_batches: rows of each batch; None if no baseline needs them.
        expired: rows that expire before each batch; None: rows do not expire, or as `row_batches`.
    """

    config: Config
    source: Source
    tables: LogTables
    examples: int
    batches: int
    ids: int
    first_touches: NDArray[np.int64]
    births: NDArray[np.int64]
    rows_deleted: int
    table_of_row: NDArray[np.int16]
    largest: int
    largest_at: int
    row_batches: RowBatches | None
    expired: RowBatches | None = None

    @property
    def rows_expire(self) -> bool:
        return self.config.data.expires

    @property
    def batch_size(self) -> int:
        return self.config.data.batch_size

    @property
    def num_rows(self) -> int:
        """Distinct rows."""
        return int(self.first_touches.sum())

    def read(self, watch: Watch, label: str) -> Generator[Batch, None, None]:
        """Read the batches again; close the generator to end early.

        Raises:
            InputError: the log is unreadable or has changed.
        """
        examples = ids = 0
        with open_loader(self.config.data, seed=self.config.run.seed, source=self.source) as loader:
            for batch in watch(loader, label, self.batches):
                examples += batch.num_examples
                ids += batch.values.shape[0]
                yield batch
        self.check_same(examples, ids)

    def check_same(self, examples: int, ids: int) -> None:
        """Check that a pass read the same log as the first one; records of different logs cannot be compared.

        Raises:
            InputError: the counts differ.
        """
        if (examples, ids) != (self.examples, self.ids):
            data = self.config.data
            raise InputError(
                f"{data.path or data.format}: the log changed while it was replayed: {self.examples} examples with "
                f"{self.ids} ids, then {examples} with {ids}"
            )


def scan(
    config: Config,
    source: Source,
    tables: LogTables,
    counter: RowCounter,
    row_batches: RowBatchFile | None,
    watch: Watch,
    *,
    counts: bool = True,
    expired: RowBatchFile | None = None,
    savings: SavingsCounter | None = None,
) -> ScannedLog:
    """The first pass.

    Args:
        counts: count the rows; False if the counter has already counted this log, cut into other batches.
        expired: takes the rows that expire before each batch, if `row_batches` takes the others.
        savings: counts the batches too.

    Raises:
        InputError: the log is unreadable or empty.
    """
    examples = batches = ids = largest = largest_at = 0
    rows_of = counter.take if counts else counter.rows_of
    lives = _Lives(counter) if config.data.expires else None
    with open_loader(config.data, seed=config.run.seed, source=source) as loader:
        for batch in watch(loader, f"counting, batches of {config.data.batch_size}", None):
            rows = rows_of(batch)
            if row_batches is not None:
                row_batches.append(rows)
            if lives is not None:
                gone = lives.add(batch, rows)
                if expired is not None:
                    expired.append(gone)
            if savings is not None:
                savings.add(batch)
            if rows.shape[0] > largest:
                largest, largest_at = rows.shape[0], batches
            examples += batch.num_examples
            batches += 1
            ids += batch.values.shape[0]
    if not batches:
        raise InputError(f"{config.data.path or config.data.format}: the log is empty, expected at least one example")
    return ScannedLog(
        config=config,
        source=source,
        tables=tables,
        examples=examples,
        batches=batches,
        ids=ids,
        first_touches=counter.rows_by_table(),
        births=counter.rows_by_table() if lives is None else lives.births,
        rows_deleted=0 if lives is None else lives.rows_deleted,
        table_of_row=counter.tables_of_rows(),
        largest=largest,
        largest_at=largest_at,
        row_batches=row_batches,
        expired=expired,
    )


class _Lives:
    """Counts the rows that begin and those that expire.

    Args:
        counter: of the rows.

    Attributes:
        births: int64 by table. rows_deleted: rows that expired.
    """

    def __init__(self, counter: RowCounter) -> None:
        self._counter = counter
        self._is_alive = np.zeros(1024, dtype=np.bool_)  # by row number
        self.births = np.zeros_like(counter.rows_by_table())
        self.rows_deleted = 0

    def add(self, batch: Batch, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Count a batch with these rows. Returns the rows that expire before it."""
        gone = self._counter.expired(batch)
        num_rows, known = self._counter.num_rows, self._is_alive.shape[0]
        if num_rows > known:
            self._is_alive = np.resize(self._is_alive, max(num_rows, 2 * known))
            self._is_alive[known:] = False
        self._is_alive[gone] = False
        self.rows_deleted += gone.shape[0]
        new = rows[~self._is_alive[rows]]
        self._is_alive[rows] = True
        self.births += np.bincount(self._counter.tables_of_rows()[new], minlength=self.births.shape[0])
        return gone
