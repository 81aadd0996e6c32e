"""Small jobs whose rows leave the cache and come back, for tests of races."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from bagpipe.pipeline.stream import Stream, Streams
from bagpipe.schedule.ir.program import Resource
from bagpipe.testing.plain_job import PlainSettings
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, Table

__all__ = ["MissingWait", "batches", "settings"]

NUM_FEATURES = 3
NUM_EXAMPLES = 6
NUM_IDS = 60

SCHEMA = DataSchema(
    label="label",
    dense=("age", "price"),
    features=tuple(Feature(name=f"f{number}", table=f"f{number}") for number in range(NUM_FEATURES)),
    tables=tuple(Table(name=f"f{number}", rows=NUM_IDS) for number in range(NUM_FEATURES)),
)


def settings(**values: Any) -> PlainSettings:
    """Settings with the smallest cache by default, so that rows leave and come back with every batch."""
    defaults: dict[str, Any] = {
        "cache_rows": 24, "lookahead": 3, "prefetch_depth": 2, "read_ahead": 3, "dim": 4, "bottom_mlp": (),
        "top_mlp": (), "rows": "adagrad",
    }  # fmt: skip
    return PlainSettings(schema=SCHEMA, **{**defaults, **values})


def batches(count: int = 10) -> list[Batch]:
    """Batches of skewed ids, in bags of zero to two."""
    rng = np.random.default_rng(1)
    made = []
    for index in range(count):
        lengths = rng.integers(0, 3, (NUM_FEATURES, NUM_EXAMPLES)).astype(np.int32)
        # Half of them are ids of a few hot rows.
        hottest = np.where(rng.random(int(lengths.sum())) < 0.5, 4, NUM_IDS)
        ids = (rng.random(len(hottest)) * hottest).astype(np.int64)
        made.append(
            Batch(
                index=index,
                dense=rng.random((NUM_EXAMPLES, 2), dtype=np.float32),
                values=ids,
                lengths=lengths,
                labels=rng.integers(0, 2, NUM_EXAMPLES).astype(np.float32),
            )
        )
    return made


class MissingWait:
    """Streams with one missing wait between two lanes. The lane's thread still waits, so the host order is unchanged.

    Args:
        inner: watched streams.
        lane: the lane that does not wait.
        source: the lane it should wait for.
    """

    def __init__(self, inner: Streams, lane: str, source: str) -> None:
        self.is_async = inner.is_async
        self.memory, self.origin, self.here = inner.memory, inner.origin, inner.here
        self._inner = inner
        self._lane = lane
        self._source = source

    def stream(self, resource: Resource) -> Stream:
        stream = self._inner.stream(resource)
        if resource.name == self._lane:
            wait, patched = stream.wait, cast(Any, stream)
            patched.wait = lambda event: wait(replace(event, event=None) if event.lane == self._source else event)
        return stream
