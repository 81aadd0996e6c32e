"""Workloads: Criteo-like click logs on bounded tables, and models of two sizes.

    Workload ──schema_toml──> data.schema      Workload ──config(url, rows, lookahead)──> trainer Config

Tables have the row counts of the full Criteo Kaggle set, those above 100,000 divided by `SCALE`. Ids follow the bounded
Zipf laws fitted to Criteo's columns (data.criteo_skew); one exponent for all tables above 1,000 rows: with 1.2 the
most popular 1 % of all rows get 92 % of the accesses, as in the full click logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagpipe.config.sections import (
    CacheConfig,
    Config,
    DataConfig,
    Model,
    ModelConfig,
    OptimConfig,
    OracleConfig,
    RunConfig,
    StoreConfig,
)
from data.criteo_skew import CRITEO_KAGGLE_ROWS

__all__ = ["LOOKAHEADS", "TABLE_ROWS", "TOTAL_ROWS", "WORKLOADS", "Workload", "schema_toml"]

SCALE = 32
#: Batches fetched ahead: the default of the trainer.
PREFETCH_DEPTH = 4
#: Batches in the window. 1 means no lookahead: rows are still prefetched, eviction goes by recency.
LOOKAHEADS = (1, 8, 32, 128)
_ZIPF_EXPONENT = 1.2
_ZIPF_ABOVE_ROWS = 1_000

TABLE_ROWS: Mapping[str, int] = {
    f"C{number}": rows if rows < 100_000 else rows // SCALE for number, rows in enumerate(CRITEO_KAGGLE_ROWS, start=1)
}
TOTAL_ROWS = sum(TABLE_ROWS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, a batch size, cache sizes and targets.

    Attributes:
        name: for the command line and the report.
        target_share: wanted share of a step in direct mode that is not computation.
        target_ratio: largest cached step / compute-only step; None: no target.
        target_speedup: smallest direct step / cached step.
        model, bottom_mlp, top_mlp, embedding_dim, batch_size: as in the configuration.
        cache_shares: cache sizes, as shares of all rows.
        warmup_steps: steps before measuring with a cache: enough to fill the largest one.
        measured_steps: steps measured with a cache.
        direct_steps: steps measured in direct mode.
    """

    name: str
    target_share: float
    target_ratio: float | None
    target_speedup: float
    model: Model
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    embedding_dim: int
    batch_size: int
    cache_shares: tuple[float, ...]
    warmup_steps: int
    measured_steps: int
    direct_steps: int

    def config(self, *, url: str, schema_path: str, cache_rows: int, lookahead: int, steps: int) -> Config:
        """The trainer's configuration of one run."""
        return Config(
            data=DataConfig(format="synthetic", schema=schema_path, batch_size=self.batch_size, eval_fraction=0.0),
            oracle=OracleConfig(lookahead=lookahead),
            cache=CacheConfig(rows=cache_rows, prefetch_depth=PREFETCH_DEPTH),
            store=StoreConfig(url=url, namespace=self.name),
            model=ModelConfig(
                name=self.model, embedding_dim=self.embedding_dim, bottom_mlp=self.bottom_mlp, top_mlp=self.top_mlp
            ),
            optim=OptimConfig(rows="adam", dense="sgd"),
            run=RunConfig(seed=1, threads=1, steps=steps),
        )


def schema_toml(num_examples: int) -> str:
    """The schema file of the synthetic reader."""
    lines = ["[synthetic]", f"rows = {num_examples}"]
    lines += [f"[tables.{name}]\nrows = {rows}" for name, rows in TABLE_ROWS.items()]
    lines += [
        f"[synthetic.features.{name}]\nexponent = {_ZIPF_EXPONENT}"
        for name, rows in TABLE_ROWS.items()
        if rows > _ZIPF_ABOVE_ROWS
    ]
    return "\n".join(lines) + "\n"


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="paper-75",
            target_share=0.75,
            target_ratio=1.06,
            target_speedup=3.7,
            model="dlrm",
            bottom_mlp=(128,),
            top_mlp=(128,),
            embedding_dim=64,
            batch_size=4096,
            cache_shares=(0.02, 0.03, 0.05, 0.10),
            warmup_steps=50,
            measured_steps=60,
            direct_steps=15,
        ),
        Workload(
            name="paper-91",
            target_share=0.915,
            target_ratio=None,
            target_speedup=7.5,
            model="wide-deep",
            bottom_mlp=(16,),
            top_mlp=(8,),
            embedding_dim=128,
            batch_size=512,
            cache_shares=(0.01, 0.02, 0.05, 0.10),
            warmup_steps=200,
            measured_steps=300,
            direct_steps=40,
        ),
    )
}
