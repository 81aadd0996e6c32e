"""A cacher whose indexing is in shards sends the batches of one that indexes alone."""

from __future__ import annotations

import pytest

from tests.cacher.daemons import config, planned_batches, spec_of
from tests.cacher.sharding import assert_same_ranks, batches_of, data_of, sharded

pytestmark = pytest.mark.multiproc


def test_local_shards_whatever_the_assignment_of_examples() -> None:
    """One set of shards serves all phases: their settings differ in nothing that they use."""
    job = sharded(config(limit=600, batch_size=50, lookahead=5), "3")
    with data_of(job) as data:
        for world_size, phase in ((1, "train"), (3, "train"), (2, "eval")):
            assert_same_ranks(
                batches_of(data, job, world_size, phase=phase),
                planned_batches(job, world_size, phase),  # type: ignore[arg-type]
            )
        first = data.phase("train", spec_of(job, data.schema, 2), max_steps=3)
        assert ([batch.batch.index for batch in first], first.end) == ([0, 1, 2], 3)
        resumed = planned_batches(job, 2, first_batch=4)
        state = batches_of(data, job, 2)[0][3].batch.reader_state
        assert_same_ranks(batches_of(data, job, 2, first_batch=4), resumed)
        assert_same_ranks(batches_of(data, job, 2, first_batch=4, reader_state=state), resumed)
