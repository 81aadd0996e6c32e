"""Several ranks are exact: direct mode's bits at every world size, one rank's numbers up to summation order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.rank_batch import RankBatch
from tests.effort import some_of
from tests.system.clicks import NUM_EXAMPLES
from tests.system.jobs import change, run_job
from tests.system.rank_threads import RanksOutcome, run_ranks

MakeConfig = Callable[..., Config]

#: (schema, model, row optimizer)
JOBS = (("sum", "dlrm", "adagrad"), ("mixed", "dcnv2", "adam"), ("everything", "factory", "rowwise_adagrad"))


def direct(config: Config) -> Config:
    return change(config, cache__rows=0)


@pytest.mark.parametrize(
    ("world_size", "schema", "model", "optimizer"),
    some_of([(world_size, *job) for world_size in (2, 3, 4) for job in JOBS], range(0, 9, 4)),
)
def test_ranks_equal_one_rank_up_to_summation_order(
    clicks: MakeConfig, schema: str, model: str, optimizer: str, world_size: int
) -> None:
    config = change(clicks(schema, model, optimizer, limit=110), run__dtype="float64", cache__rows=150)
    alone, together = run_job(config), run_ranks(config, world_size)
    assert together.rows.keys() == alone.rows.keys()
    for name, (ids, rows) in alone.rows.items():
        assert together.rows[name][0].tolist() == ids.tolist()
        np.testing.assert_allclose(together.rows[name][1], rows, rtol=1e-12, atol=1e-12)
    for name, value in alone.dense.items():
        torch.testing.assert_close(together.dense[name], value, rtol=1e-12, atol=1e-12)
    progress = [result.progress for result in together.results]
    assert sum(p.samples for p in progress) == alone.trained.progress.samples
    assert sum(p.rows_unique for p in progress) == alone.trained.progress.rows_unique


@pytest.mark.parametrize(
    ("world_size", "assign"), some_of([*itertools.product([2, 4], ["contiguous", "locality"])], {0, 3})
)
def test_cache_and_lookahead_change_no_bit(clicks: MakeConfig, world_size: int, assign: str) -> None:
    config = change(clicks(limit=125), cacher__assign=assign)
    reference = run_ranks(direct(config), world_size)
    settings = ((40, 1, 1), (25, 8, 4), (60, 64, 2), (1000, 8, 4))
    for rows, lookahead, depth in settings if world_size == 2 else settings[1:3]:
        cached = change(config, cache__rows=rows, oracle__lookahead=lookahead, cache__prefetch_depth=depth)
        assert run_ranks(cached, world_size).digests == reference.digests, (rows, lookahead, depth)


@pytest.mark.parametrize("optimizer", some_of(["sgd", "adam"], {1}))
def test_half_rows_change_no_bit_either(clicks: MakeConfig, optimizer: str) -> None:
    config = change(clicks("mixed", "dcnv2", optimizer, limit=110), cache__dtype="bfloat16", cacher__assign="locality")
    assert run_ranks(change(config, cache__rows=40), 2).digests == run_ranks(direct(config), 2).digests


def test_batches_smaller_than_the_world(clicks: MakeConfig) -> None:
    config = change(clicks(batch_size=3, limit=31), run__dtype="float64", cache__rows=30)
    alone, together = run_job(config), run_ranks(config, 4)
    for name, (ids, rows) in alone.rows.items():
        assert together.rows[name][0].tolist() == ids.tolist()
        np.testing.assert_allclose(together.rows[name][1], rows, rtol=1e-12, atol=1e-12)


def test_evaluation_scores_every_example_once(clicks: MakeConfig) -> None:
    config = change(clicks(eval_fraction=0.3), cache__rows=60)
    ends: list[RanksOutcome] = [run_ranks(config, 2), run_ranks(direct(config), 2)]
    assert ends[0].scores == ends[1].scores
    assert sum(map(len, ends[0].scores)) == int(NUM_EXAMPLES * 0.3)


def test_locality_sends_fewer_rows(clicks: MakeConfig) -> None:
    config = change(clicks(), cache__rows=1000)
    contiguous, locality = (run_ranks(change(config, cacher__assign=name), 2) for name in ("contiguous", "locality"))
    assert locality.rows_sent < contiguous.rows_sent


def test_bad_input_on_one_rank_ends_all_ranks_at_that_batch(clicks: MakeConfig) -> None:
    """Batches before the bad input are trained and written back, and every rank reports the error."""

    def change_batches(rank: int, batches: Iterator[RankBatch]) -> Iterator[RankBatch]:
        if rank != 1:
            return batches

        def some() -> Iterator[RankBatch]:
            yield from itertools.islice(batches, 5)
            raise InputError("day_0:77: expected 40 columns, got 3")

        return some()

    config = change(clicks(), cache__rows=100)
    outcome = run_ranks(config, 3, change_batches=change_batches)
    assert outcome.digests == run_ranks(change(config, data__limit=60), 3).digests
    errors = [str(result.input_error) for result in outcome.results]
    assert errors == ["rank 1: " + errors[1], "day_0:77: expected 40 columns, got 3", "rank 1: " + errors[1]]
    assert [result.progress.steps for result in outcome.results] == [5, 5, 5]
    assert not any(result.report.stopped for result in outcome.results)


def test_data_that_ends_early_on_one_rank_is_an_error(clicks: MakeConfig) -> None:
    """All ranks stop at that batch with an error, since they trained only part of the data."""

    def change_batches(rank: int, batches: Iterator[RankBatch]) -> Iterator[RankBatch]:
        return itertools.islice(batches, 5) if rank == 1 else batches

    with pytest.raises(JobError, match=r"^the data ended at batch 5, but ranks \[0, 2\] have more$"):
        run_ranks(change(clicks(), cache__rows=100), 3, change_batches=change_batches)
