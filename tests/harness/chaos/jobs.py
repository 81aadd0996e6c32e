"""`ChaosJob`: a job small enough to be killed a hundred times a minute, whose rows leave the cache and come back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["JOBS", "SCHEMA", "ChaosJob"]

#: Three tables of two widths, one of them multi-hot; about 4,000 rows in all.
SCHEMA = """\
label = "y"
dense = ["age", "price"]
sparse = ["user", { name = "items", table = "item" }, "ad"]

[table_defaults]
dim = 4

[tables.user]
rows = 2000

[tables.item]
rows = 1500
pooling = "mean"

[tables.ad]
rows = 300

[synthetic]
rows = 100000

[synthetic.features.items]
bag = 3
bag_law = "poisson"
"""

_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosJob:
    """A job under test.

    Attributes:
        name: in reports.
        world_size: ranks.
        num_batches: to train.
        flags: of trainer and daemon, in addition to those of all jobs.
        weight: relative frequency.
    """

    name: str
    world_size: int = 1
    num_batches: int = 80
    flags: tuple[str, ...] = ()
    weight: int = 1

    def arguments(self, schema: Path) -> list[str]:
        """Flags that the trainer and its cacher both accept."""
        return [
            *("--data.format", "synthetic", "--data.schema", str(schema), "--data.workers", "0"),
            *("--data.batch_size", str(_BATCH_SIZE), "--data.limit", str(_BATCH_SIZE * self.num_batches)),
            *("--data.eval_fraction", "0", "--oracle.lookahead", "4", "--store.buckets", "8"),
            *("--model.embedding_dim", "4", "--model.bottom_mlp", "4", "--model.top_mlp", "4"),
            *self.flags,
        ]


def _flags(rows: int, optimizer: str, *more: str) -> tuple[str, ...]:
    return ("--cache.rows", str(rows), "--optim.rows", optimizer, "--optim.dense", optimizer, *more)


_STAGES = ("--pipeline.schedule", "1f1b", "--pipeline.stages", "2", "--pipeline.microbatches", "2")

#: Two ranks take longer to start than one, so their jobs are shorter and rarer.
JOBS = (
    ChaosJob(name="adagrad", flags=_flags(700, "adagrad"), weight=3),
    ChaosJob(name="adam", flags=_flags(700, "adam"), weight=3),
    ChaosJob(name="bfloat16", flags=_flags(700, "adam", "--cache.dtype", "bfloat16"), weight=2),
    ChaosJob(name="direct", flags=_flags(0, "adagrad"), num_batches=60, weight=2),
    ChaosJob(name="adam-2", world_size=2, num_batches=60, flags=_flags(400, "adam"), weight=2),
    ChaosJob(name="direct-2", world_size=2, num_batches=40, flags=_flags(0, "adam"), weight=1),
    ChaosJob(name="1f1b-2", world_size=2, num_batches=60, flags=_flags(700, "adagrad", *_STAGES), weight=2),
)
