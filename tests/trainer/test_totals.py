from __future__ import annotations

import dataclasses
import math

import pytest

from bagpipe.errors import JobError
from trainer.totals import RankTotals, combine

FIRST = RankTotals(
    steps=3, samples=16, samples_before=4, skipped_batches=1, loss_scale=64, checkpoint_stall_s=0.1, seconds=1.5,
    loss_sum=8.0, rows_unique=90, rows_inserted=30, rows_found=20, rows_fetched=10, rows_written=60,
    evictions_waiting=2, cache_rows=5, exposed_s=0.1, step_s_p50=0.02, dense_digest="d", peak_rss_bytes=100,
)  # fmt: skip
SECOND = dataclasses.replace(
    FIRST, samples=8, samples_before=2, checkpoint_stall_s=0.2, seconds=1.25, loss_sum=1.0, rows_unique=10,
    rows_inserted=5, rows_found=5, rows_fetched=4, rows_written=7, evictions_waiting=3, cache_rows=7, exposed_s=0.3,
    step_s_p50=None, peak_rss_bytes=300,
)  # fmt: skip


def test_counts_add_up_and_the_slowest_rank_sets_the_time() -> None:
    job = combine([FIRST, SECOND])
    assert job == RankTotals(
        steps=3, samples=24, samples_before=6, skipped_batches=1, loss_scale=64, checkpoint_stall_s=0.2, seconds=1.5,
        loss_sum=9.0, rows_unique=100, rows_inserted=35, rows_found=25, rows_fetched=14,
        rows_written=67, evictions_waiting=5, cache_rows=7,
        exposed_s=0.3, step_s_p50=0.02, dense_digest="d", peak_rss_bytes=300,
    )  # fmt: skip
    assert job.loss == 9.0 / 24
    assert job.hit_rate == pytest.approx(0.65)
    assert combine([FIRST]) == FIRST


def test_an_undefined_loss_is_none() -> None:
    assert dataclasses.replace(FIRST, samples=0, loss_sum=0.0).loss is None
    assert dataclasses.replace(FIRST, loss_sum=math.nan).loss is None
    assert dataclasses.replace(FIRST, rows_unique=0).hit_rate == 0.0


def test_ranks_that_drifted_apart_are_an_error() -> None:
    with pytest.raises(JobError, match="ranks 0 and 1 ended with different dense parameters, digests d and e"):
        combine([FIRST, dataclasses.replace(SECOND, dense_digest="e")])
    with pytest.raises(JobError, match="rank 0 trained 3 batches and rank 1 2"):
        combine([FIRST, dataclasses.replace(SECOND, steps=2)])
