"""`ScannedLog`: a log cut into batches and read once: its length, its batch sizes, its rows.

loader ──first pass──> RowCounter: counts rows once for all batch sizes ──numbers──> RowBatchFile, for baselines
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
from data.replay.row_batch_file import RowBatchFile
from data.replay.row_counter import RowCounter
from data.source import Source

__all__ = ["ScannedLog", "Watch", "scan"]


class Watch(Protocol):
    """Shows how far a pass is: hands the batches on as they are."""

    def __call__(self, batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScannedLog:
    """A log cut into batches.

    Attributes:
        config: how it is read.
        source: it.
        tables: its tables, numbered.
        examples, batches, ids: read.
        first_touches: int64 by table: distinct rows.
        table_of_row: int16 by row number.
        largest: unique rows of the largest batch. largest_at: the number of that batch.
        spool: rows of each batch; None if no baseline wants them.
    """

    config: Config
    source: Source
    tables: LogTables
    examples: int
    batches: int
    ids: int
    first_touches: NDArray[np.int64]
    table_of_row: NDArray[np.int16]
    largest: int
    largest_at: int
    spool: RowBatchFile | None

    @property
    def batch_size(self) -> int:
        return self.config.data.batch_size

    @property
    def num_rows(self) -> int:
        """Distinct rows."""
        return int(self.first_touches.sum())

    def read(self, watch: Watch, label: str) -> Generator[Batch, None, None]:
        """One pass; close it to end it early.

        Raises:
            InputError: the log cannot be read, or is another than before.
        """
        examples = ids = 0
        with open_loader(self.config.data, seed=self.config.run.seed, source=self.source) as loader:
            for batch in watch(loader, label, self.batches):
                examples += batch.num_examples
                ids += batch.values.shape[0]
                yield batch
        self.check_same(examples, ids)

    def check_same(self, examples: int, ids: int) -> None:
        """Every pass must read what the first one read, or the records could not be compared.

        Raises:
            InputError: it did not.
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
    census: RowCounter,
    spool: RowBatchFile | None,
    watch: Watch,
    *,
    counts: bool = True,
) -> ScannedLog:
    """The first pass.

    Args:
        counts: the census counts; else it has counted this log before, cut otherwise, and only tells its rows.

    Raises:
        InputError: the log cannot be read, or is empty.
    """
    examples = batches = ids = largest = largest_at = 0
    rows_of = census.take if counts else census.rows_of
    with open_loader(config.data, seed=config.run.seed, source=source) as loader:
        for batch in watch(loader, f"census, batches of {config.data.batch_size}", None):
            rows = rows_of(batch)
            if spool is not None:
                spool.append(rows)
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
        first_touches=census.rows_by_table(),
        table_of_row=census.tables_of_rows(),
        largest=largest,
        largest_at=largest_at,
        spool=spool,
    )
