"""The three logs, spooled to disk as the row numbers of each batch.

    reader, or a Zipf law ──> unique rows of each batch (ascending by table and id) ──> RowBatchFile

Evictions depend only on the unique rows of the batches, not on how often each occurs in its batch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.config.sections import DataConfig
from bagpipe.types.schema import DataSchema, Table
from benchmarks.harness.click_logs import SAMPLE_VARIABLE
from data.criteo_skew import criteo_kaggle_rows
from data.loader import open_loader
from data.replay.row_batch_file import RowBatchFile
from data.synthetic import SyntheticSource
from data.synthetic_options import options_at
from data.zipf import ZipfLaw

__all__ = ["EXPERIMENTS", "Experiment", "Log"]

SHARES = (0.005, 0.02, 0.1, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log on disk.

    Attributes:
        batches: rows of each batch, numbers in ``[0, num_rows)``.
        num_rows: size of the numbering.
        distinct: rows that occur.
    """

    batches: RowBatchFile
    num_rows: int
    distinct: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One comparison.

    Attributes:
        title: for the report.
        batch_sizes: examples in a batch; one log each.
        lookaheads: in batches; the target applies to the last one.
        shares: cache sizes as shares of the distinct rows.
        cache_rows: further cache sizes, in rows.
        rows: of (batch size, number of batches): unique rows of each batch, and the size of their numbering.
    """

    title: str
    batch_sizes: tuple[int, ...]
    lookaheads: tuple[int, ...]
    shares: tuple[float, ...] = SHARES
    cache_rows: tuple[int, ...] = ()
    rows: Callable[..., tuple[Iterator[NDArray[np.int32]], int]]

    @contextmanager
    def open(self, batch_size: int, folder: Path) -> Iterator[Log]:
        """The log, which is deleted at the end of the block."""
        with RowBatchFile(folder, "log") as spool:
            rows_of_batches, num_rows = self.rows(batch_size)
            seen = np.zeros(num_rows, dtype=np.bool_)
            for rows in rows_of_batches:
                spool.append(rows)
                seen[rows] = True
            yield Log(batches=spool, num_rows=num_rows, distinct=int(np.count_nonzero(seen)))


def _sample(batch_size: int, num_batches: int) -> tuple[Iterator[NDArray[np.int32]], int]:
    """The real sample; `num_batches` is ignored. Ids are unbounded, so rows are numbered over the whole log."""
    config = DataConfig(path=os.environ[SAMPLE_VARIABLE], format="criteo-tsv", batch_size=batch_size, eval_fraction=0.0)
    words: list[NDArray[np.int64]] = []
    with open_loader(config, seed=0) as loader:
        for batch in loader:
            tables = np.repeat(np.arange(batch.num_features), np.diff(batch.feature_offsets()))
            words.append(np.unique((tables.astype(np.int64) << 40) | batch.values))
    known = np.unique(np.concatenate(words))
    return (np.searchsorted(known, rows).astype(np.int32) for rows in words), known.shape[0]


def _kaggle(batch_size: int, num_batches: int) -> tuple[Iterator[NDArray[np.int32]], int]:
    """The log of ``python -m data synth`` with the profile criteo-kaggle; ids are ranks within their tables."""
    options = options_at("", profile="criteo-kaggle")
    sizes = criteo_kaggle_rows()
    schema: DataSchema = dataclasses.replace(
        options.schema, tables=tuple(Table(name=table.name, rows=sizes[table.name]) for table in options.schema.tables)
    )
    source = SyntheticSource(schema=schema, features=options.features, rows=batch_size * num_batches)
    base = np.concatenate([[0], np.cumsum(list(sizes.values()))])

    def batches() -> Iterator[NDArray[np.int32]]:
        for segment in source.segments():
            for block in source.blocks(segment):
                columns = source.read(block)
                ids = np.split(columns.values, np.cumsum(columns.lengths.sum(axis=1))[:-1])
                yield np.concatenate(
                    [np.unique(part) + start for part, start in zip(ids, base, strict=False)], dtype=np.int32
                )

    return batches(), int(base[-1])


def _zipf(batch_size: int, num_batches: int) -> tuple[Iterator[NDArray[np.int32]], int]:
    """One table of two million rows; the k-th most used row is drawn in proportion to ``k ** -0.6``."""
    law = ZipfLaw(vocabulary=2_000_000, exponent=0.6)

    def batches() -> Iterator[NDArray[np.int32]]:
        for number in range(num_batches):
            generator = np.random.Generator(np.random.Philox(key=np.array([7, number], np.uint64)))
            yield np.unique(law.ranks(generator.random(batch_size))).astype(np.int32)

    return batches(), law.vocabulary


EXPERIMENTS: Mapping[str, Experiment] = {
    "sample": Experiment(
        title="the real Criteo sample, 80,000 examples",
        batch_sizes=(512, 1024),
        lookaheads=(1, 8, 16, 17, 32, 64, 100),
        cache_rows=(18_000, 36_000),
        rows=_sample,
    ),
    "kaggle": Experiment(
        title="synthetic Criteo Kaggle at full scale, 33.8 M rows",
        batch_sizes=(16_384,),
        lookaheads=(1, 8, 200),
        rows=_kaggle,
    ),
    "zipf": Experiment(
        title="a flat Zipf law, exponent 0.6 over 2 M rows",
        batch_sizes=(8_192,),
        lookaheads=(1, 8, 32, 200),
        rows=_zipf,
    ),
}
