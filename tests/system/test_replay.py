"""A replay equals the job in rows used, read and written, and in hit rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from bagpipe.config.sections import Config
from bagpipe.types.batch import Batch
from data.replay.options import Sweep, parse_sweep
from data.replay.records import ReplayRecord, Setting
from data.replay.sweep import replay
from data.replay.trials import run_trial
from tests.data.replay.logs import write_log
from tests.system.jobs import change, largest_batch, run_job
from tests.system.rank_threads import run_ranks


def plain(batches: Iterable[Batch], label: str, total: int | None) -> Iterable[Batch]:
    return batches


def replayed(config: Config, world_size: int = 1) -> ReplayRecord:
    sweep = Sweep(
        configs=(config,),
        policies=(config.oracle.policy,),
        lookaheads=(config.oracle.lookahead,),
        cache_rows=(config.cache.rows,),
        world_size=world_size,
        json_path="",
        report_path="",
        train=False,
        trainer_flags=(),
    )
    (record,) = replay(sweep, plain).records
    assert record.error is None
    return record


@pytest.mark.parametrize(
    ("schema", "model", "policy", "lookahead", "data"),
    [
        ("sum", "dlrm", "belady-window", 1, {}),
        ("mixed", "wide-deep", "belady-window", 8, {"eval_fraction": 0.2}),
        ("ragged", "wide-deep", "drop-unused", 4, {"epochs": 2, "shuffle": True}),
        ("weighted", "dlrm", "belady-window", 26, {"limit": 200, "batch_size": 7}),
        ("sum", "dlrm", "belady-window", 3, {"expire_after": 4.0, "expire_unit": "steps", "expire_every": 2}),
    ],
)
def test_one_rank(
    clicks: Callable[..., Config], schema: str, model: str, policy: str, lookahead: int, data: dict[str, object]
) -> None:
    config = clicks(schema, model, **data)
    config = change(config, oracle__policy=policy, oracle__lookahead=lookahead)
    config = change(config, cache__rows=largest_batch(config) + 3)
    found, done = replayed(config), run_job(config)
    progress = done.trained.progress
    assert found.batches == progress.steps
    assert found.rows_unique == progress.rows_unique
    assert found.rows_fetched == progress.rows_fetched
    assert found.rows_written == progress.rows_written
    assert found.evictions_waiting == progress.evictions_waiting > 0, "the cache holds little more than a batch"
    assert found.hit_rate == progress.hit_rate
    assert found.rows_deleted == progress.rows_deleted
    assert (progress.rows_deleted > 0) is config.data.expires
    assert (found.rows_first_touch or 0) - (found.rows_deleted or 0) == sum(len(ids) for ids, _ in done.rows.values())


@pytest.mark.parametrize("assign", ["contiguous", "locality"])
def test_several_ranks(clicks: Callable[..., Config], assign: str) -> None:
    config = change(clicks(), cacher__assign=assign, oracle__lookahead=4, run__dtype="float64")
    config = change(config, cache__rows=largest_batch(config) // 3 + 3)
    found, done = replayed(config, 3), run_ranks(config, 3)
    ranks = [result.progress for result in done.results]
    assert found.rows_unique == sum(rank.rows_unique for rank in ranks)
    assert found.rows_fetched == sum(rank.rows_fetched for rank in ranks)
    assert found.rows_written == sum(rank.rows_written for rank in ranks)
    assert found.evictions_waiting == sum(rank.evictions_waiting for rank in ranks)
    assert found.exchange_rows == done.rows_sent


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_trial_is_the_trainer_itself(tmp_path: Path) -> None:
    log = write_log(tmp_path, rows=400)
    flags = ["--data.path", str(log), "--data.format", "parquet", "--data.batch_size", "40"]
    sweep = parse_sweep([*flags, "--cache_rows", "500", "--lookahead", "4", "--policy", "drop-unused"])
    (record,) = replay(sweep, plain).records
    setting = Setting(policy="drop-unused", lookahead=4, cache_rows=500, batch_size=40, world_size=1)
    trial = run_trial(setting, sweep)
    assert trial.error is None
    assert (trial.steps, trial.rows_fetched, trial.rows_written) == (10, record.rows_fetched, record.rows_written)
    assert trial.hit_rate == record.hit_rate
    assert "compute" in {span.lane for span in trial.step}
    assert all(0 <= span.start_s <= span.stop_s for span in trial.step)
    failed = run_trial(dataclasses.replace(setting, policy="lru"), sweep)
    assert failed.error == "--oracle.policy must be one of belady-window, drop-unused, got 'lru'"
