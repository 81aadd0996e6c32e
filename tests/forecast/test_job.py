from __future__ import annotations

import pytest

from bagpipe.dense.parallel.shard_layout import kept_bytes
from bagpipe.errors import InputError
from bagpipe.forecast.job import DenseCosts
from bagpipe.types.shard_level import SHARD_LEVELS, ShardLevel
from tests.forecast.jobs import job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks: expected at least 1, got 0"),
        ({"ranks": 2000}, "ranks: expected at most the 1024 examples of a batch, got 2000"),
        ({"batch_examples": 512}, "batch_examples: expected 1024, as the rows were counted, got 512"),
        ({"dim": 0}, "dim: expected at least 1, got 0"),
    ],
)
def test_impossible_jobs(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**changes)


@pytest.mark.parametrize("level", SHARD_LEVELS)
@pytest.mark.parametrize("states", [0, 1, 2])
def test_shards_keep_what_the_trainer_keeps(level: ShardLevel, states: int) -> None:
    kept = kept_bytes(level, 1000, 4, itemsize=4, states=states)
    copies = DenseCosts(param_bytes=4000.0, weight_copies=2.0 + states).copies_of_rank(level, 4)
    assert copies * 4000 == pytest.approx(kept.parameters + kept.gradients + kept.state)
