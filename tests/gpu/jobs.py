"""Small jobs without torchrec: batches by name, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.checkpoint.manifest import Part
from bagpipe.checkpoint.recorder import Recorder
from bagpipe.checkpoint.writer import CheckpointPaths
from bagpipe.testing.fence_jobs import take_over
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, Table

__all__ = ["EVERY_ROW", "JOBS", "SHAPES", "Outcome", "batches_of", "recorded", "run_plain", "smallest_cache"]

#: More cache rows than any job here fills.
EVERY_ROW = 20_000

NUM_EXAMPLES, NUM_BATCHES, NUM_DENSE, NUM_TABLES = 96, 10, 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of the bags.

    Attributes:
        most: upper bound of ids in a bag; 1: exactly one.
        pooling, weighted: of all tables.
    """

    most: int = 1
    pooling: str = "sum"
    weighted: bool = False


SHAPES: Mapping[str, Shape] = {
    "one-hot": Shape(),
    "multi-hot": Shape(most=6),
    "mean": Shape(most=6, pooling="mean"),
    "weighted": Shape(most=6, weighted=True),
}

#: (shape, row optimizer): every shape and every optimizer.
JOBS = (("one-hot", "adagrad"), ("multi-hot", "sgd"), ("mean", "rowwise_adagrad"), ("weighted", "adam"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Final numbers of a job.

    Attributes:
        digests: of the dense part and the rows.
        loss_sum: of all examples.
        dense: parameters by name, on the host.
        rows: by table number, records ``[n, width]`` by id.
    """

    digests: tuple[str, str]
    loss_sum: float
    dense: Mapping[str, Tensor]
    rows: Sequence[NDArray[Any]]


def schema_of(shape: Shape) -> DataSchema:
    names = [f"C{number}" for number in range(NUM_TABLES)]
    return DataSchema(
        label="label",
        dense=tuple(f"I{number}" for number in range(NUM_DENSE)),
        features=tuple(Feature(name=name, table=name, weighted=shape.weighted) for name in names),
        tables=tuple(Table(name=name, pooling=shape.pooling) for name in names),  # type: ignore[arg-type]
    )


@cache
def batches_of(name: str) -> tuple[Batch, ...]:
    """Skewed ids with any 64-bit value, one of them in nearly every example; the last batch is smaller."""
    shape, generator = SHAPES[name], np.random.default_rng(5)
    batches = []
    for index in range(NUM_BATCHES):
        num_examples = NUM_EXAMPLES if index < NUM_BATCHES - 1 else NUM_EXAMPLES // 3
        lengths = np.ones((NUM_TABLES, num_examples), np.int32)
        if shape.most > 1:
            lengths = generator.integers(0, shape.most + 1, lengths.shape, dtype=np.int32)
        count = int(lengths.sum())
        ranks = np.minimum(generator.zipf(1.3, count), 4000).astype(np.uint64)
        values = (ranks * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
        batches.append(
            Batch(
                index=index,
                dense=generator.random((num_examples, NUM_DENSE), np.float32),
                values=values,
                lengths=lengths,
                labels=(generator.random(num_examples) < 0.3).astype(np.float32),
                weights=generator.random(count, np.float32) if shape.weighted else None,
            )
        )
    return tuple(batches)


def smallest_cache(name: str) -> int:
    """Unique rows of the largest batch."""
    sizes = []
    for batch in batches_of(name):
        offsets = batch.feature_offsets()
        parts = pairwise(offsets.tolist())
        sizes.append(sum(len(np.unique(batch.values[start:stop])) for start, stop in parts))
    return max(sizes)


@contextmanager
def recorded(job: PlainJob, folder: Path, every: int) -> Iterator[dict[int, Part | None]]:
    """Let the entered job make checkpoints. Yields its parts by step."""
    parts: dict[int, Part | None] = {}

    def place(step: int) -> Path:
        path = folder / str(step)
        path.mkdir(exist_ok=True)
        return path

    recorder = Recorder(
        every=every,
        paths=CheckpointPaths(generation=folder, step=place),
        on_part=lambda step, epoch, part: parts.__setitem__(step, part),
        cache=job.cache,
        store=job.store,
        dense=job.engine.dense,
        read_ahead=job.engine.settings.read_ahead,
    )
    job.store.claim()
    take_over(job.store)
    job.engine = job.make_engine(job.engine.dense, claim=lambda: False, recorder=recorder)
    with recorder:
        yield parts


def run_plain(name: str, **settings: Any) -> Outcome:
    """Train a shape's batches; settings as in `PlainSettings`."""
    given: dict[str, Any] = {"eps": 1e-3, **settings}
    with PlainJob(PlainSettings(schema=schema_of(SHAPES[name]), **given)) as job:
        result = job.train(batches_of(name))
        rows = [job.store.read(table, job.store.ids(table)).rows for table in range(NUM_TABLES)]
        return Outcome(
            digests=job.digests(),
            loss_sum=float(result.progress.loss_sum),
            dense={key: value.detach().cpu() for key, value in job.model.named_parameters()},
            rows=rows,
        )
