"""A long-running daemon does not grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagpipe.oracle.rank_batch import RankBatch
from tests.cacher.daemons import Daemon, all_batches, config

NUM_BATCHES = 20_000
EARLY, LATE = 4_000, 19_900
MAX_GROWTH_BYTES = 8 << 20


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(600)
def test_twenty_thousand_batches(tmp_path: Path) -> None:
    """Two ranks, an evicting cache, 100 epochs."""
    job = config(batch_size=10, limit=2000, rows=1500, lookahead=8, eval_fraction=0.0)
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, epochs=NUM_BATCHES // 200))
    rss_bytes: dict[int, int] = {}
    with Daemon(job, f"unix:{tmp_path}/c.sock") as daemon:

        def take(rank: int, rank_batches: Iterator[RankBatch]) -> list[RankBatch]:
            count = 0
            for count, rank_batch in enumerate(rank_batches, start=1):
                assert rank_batch.batch.index == count - 1
                if rank == 0 and count in (EARLY, LATE):
                    rss_bytes[count] = daemon.rss_bytes()
            assert count == NUM_BATCHES
            return []

        all_batches(daemon.url, job, 2, take=take)
    assert rss_bytes[LATE] < rss_bytes[EARLY] + MAX_GROWTH_BYTES, rss_bytes
