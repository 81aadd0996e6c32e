"""Data that shards index, and its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bagpipe.config.sections import Config
from bagpipe.oracle.rank_batch import RankBatch
from cacher.planning import PlannedData
from cacher.shards import Shards
from tests.cacher.daemons import assert_same_batches, spec_of


def sharded(job: Config, *shards: str, tables: tuple[str, ...] = ()) -> Config:
    return dataclasses.replace(job, cacher=dataclasses.replace(job.cacher, shards=shards, shard_tables=tables))


@contextmanager
def data_of(job: Config) -> Iterator[PlannedData]:
    """The data of a job, indexed by its shards."""
    data = PlannedData(job.data, job.run.seed)
    with Shards(job, data.schema, data.identity, data.ids_by_feature()) as shards:
        data.shards = shards
        yield data


def batches_of(data: PlannedData, job: Config, world_size: int, **options: Any) -> list[list[RankBatch]]:
    phase = data.phase(options.pop("phase", "train"), spec_of(job, data.schema, world_size), **options)
    batches = list(phase)
    return [[batch.for_rank(rank) for batch in batches] for rank in range(world_size)]


def assert_same_ranks(ours: list[list[RankBatch]], theirs: list[list[RankBatch]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_same_batches(one, other)
