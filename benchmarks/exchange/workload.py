"""Named data sets, each with its window and cache."""

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
    """Batches that are planned, some of which are counted.

    Attributes:
        format: of the data; criteo-tsv needs a path.
        batch_size: examples in a global batch.
        dim: weights per row, 4 bytes each.
        lookahead: batches in the window.
        cache_rows: rows in the caches of all ranks together.
        warmup: batches planned before the first counted one: the cache is full by then, or as full as it gets.
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
        """Spec of a planner for this data."""
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
        """The same batches in every call; enough to fill the window behind the last counted one."""
        with open_loader(data, seed=0) as loader:
            yield from itertools.islice(loader, self.warmup + self.measured + self.lookahead - 1)


WORKLOADS = {
    # 80,000 examples make 78 batches. Batch sizes 512 and 1024 were considered; 1024 is closer to real jobs.
    "sample": Workload(
        format="criteo-tsv", batch_size=1024, dim=48, lookahead=16, cache_rows=100_000, warmup=20, measured=40
    ),
    # Window, batch and width of the original Bagpipe evaluation. Its cache of 4 M rows does not fill in a run of a few
    # minutes; this smaller one does, so rows leave and return with every batch.
    "criteo-kaggle": Workload(
        format="synthetic", batch_size=16_384, dim=48, lookahead=200, cache_rows=2_000_000, warmup=250, measured=100
    ),
}
