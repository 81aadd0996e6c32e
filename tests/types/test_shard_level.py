from __future__ import annotations

from itertools import pairwise

from bagpipe.dense.parallel.shard_layout import kept_bytes
from bagpipe.types.shard_level import SHARD_LEVELS


def test_each_level_divides_more_than_the_one_before():
    kept = [kept_bytes(level, 1000, 4, itemsize=4, states=1) for level in SHARD_LEVELS]
    totals = [each.parameters + each.gradients + each.state for each in kept]
    assert all(more > less for more, less in pairwise(totals))
