"""Training in steps: the same bits as a whole run, and a store that is current at rest."""

from __future__ import annotations

import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.testing.plain_job import PlainJob, PlainSettings, plan_rank_batches
from bagpipe.training.digest import embedding_digest
from data import open_loader, open_source

DATA = DataConfig(format="synthetic", limit=1_500, batch_size=100, workers=0, eval_fraction=0.0)


def _settings(cache_rows: int) -> PlainSettings:
    return PlainSettings(schema=open_source(DATA, seed=0).schema, cache_rows=cache_rows, lookahead=3, rows="adagrad")


def _whole(num_batches: int | None = None) -> tuple[str, str]:
    with PlainJob(_settings(0)) as job, open_loader(DATA, seed=0) as loader:
        job.train(batch for batch in loader if num_batches is None or batch.index < num_batches)
        return job.digests()


@pytest.mark.parametrize("cache_rows", [0, 9_000])
def test_steps_give_the_bits_of_a_whole_run(cache_rows: int) -> None:
    with PlainJob(_settings(cache_rows)) as job, open_loader(DATA, seed=0) as loader:
        with job.engine.train_in_steps(plan_rank_batches(loader, job.spec)) as run:
            numbers = []
            while (batch := run.step()) is not None:
                numbers.append(batch.rank_batch.batch.index)
            assert run.end().progress.steps == len(numbers) == 15
        assert job.digests() == _whole()


def test_the_store_is_current_after_a_flush_and_training_goes_on() -> None:
    with PlainJob(_settings(9_000)) as job, open_loader(DATA, seed=0) as loader:
        with job.engine.train_in_steps(plan_rank_batches(loader, job.spec)) as run:
            for _ in range(4):
                run.step()
            run.flush()
            assert embedding_digest(job.store) == _whole(4)[1]
            while run.step() is not None:
                pass
            run.end()
        assert job.digests() == _whole()


def test_a_run_that_is_left_early_ends_its_lanes_and_its_rows_can_be_rescued() -> None:
    with PlainJob(_settings(9_000)) as job, open_loader(DATA, seed=0) as loader:
        with job.engine.train_in_steps(plan_rank_batches(loader, job.spec)) as run:
            for _ in range(4):
                run.step()
            run.give_up()
            run.rescue()
        assert embedding_digest(job.store) == _whole(4)[1]
