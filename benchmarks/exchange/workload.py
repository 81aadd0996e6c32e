"""Named data sets, with the window and cache they are planned for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bagpipe.config.sections import DataConfig, DataFormat
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import Batch
from data.formats import open_source
from data.loader import open_loader

__all__ = ["KAGGLE_SCHEMA", "WORKLOADS", "Workload"]

KAGGLE_SCHEMA = """\
[synthetic]
rows = 100000000
profile = "criteo-kaggle"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is planned.

    Attributes:
        format: of the data; criteo-tsv needs a path.
        batch_size: examples in a global batch.
        dim: weights per row, 4 bytes each.
        lookahead: batches in the window.
        cache_rows: rows in the caches of all ranks together.
        warmup: batches planned before any is counted: the cache is full by then, or as full as it gets.
        measured: batches counted.
    """

    format: DataFormat
    batch_size: int
    dim: int
    lookahead: int
    cache_rows: int
    warmup: int
    measured: int

    def spec(self, data: DataConfig, world_size: int, assign: str) -> OracleSpec:
        """Every table, each with its own features."""
        schema = open_source(data).schema
        numbers = {table.name: number for number, table in enumerate(schema.tables)}
        refs = [FeatureRef(feature=n, table=numbers[f.table]) for n, f in enumerate(schema.features)]
        return OracleSpec(
            table_rows=tuple(table.rows for table in schema.tables),
            features=tuple(sorted(refs, key=lambda ref: ref.table)),
            num_slots=self.cache_rows // world_size,
            lookahead=self.lookahead,
            world_size=world_size,
            assign=assign,
        )

    def batches(self, data: DataConfig) -> Iterator[Batch]:
        """As many as fill the window after the last one counted, the same in every call."""
        with open_loader(data, seed=0) as loader:
            yield from itertools.islice(loader, self.warmup + self.measured + self.lookahead - 1)


WORKLOADS = {
    # 80,000 examples make 78 batches; the larger batch of the two sizes tried (512, 1024) is nearer to real ones.
    "sample": Workload(
        format="criteo-tsv", batch_size=1024, dim=48, lookahead=16, cache_rows=100_000, warmup=20, measured=40
    ),
    # Window, batch and width of the original Bagpipe evaluation. Its cache of 4 M rows would not be full in a run of
    # some minutes; this one is, so rows leave and come back with every batch.
    "criteo-kaggle": Workload(
        format="synthetic", batch_size=16_384, dim=48, lookahead=200, cache_rows=2_000_000, warmup=250, measured=100
    ),
}
