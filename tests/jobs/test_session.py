"""Runs of a session have the bits of one run; an error releases everything. With ranks: `tests.train_pipeline`."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.digest import embedding_digest
from tests.jobs.small_job import NUM_BATCHES, SmallJob


def _digests(num_batches: int = NUM_BATCHES) -> tuple[str, str]:
    job = SmallJob(cache_rows=0)
    with job.session() as session:
        result = job.train(session, last=num_batches)
        assert result.progress.steps == num_batches
        return job.digests(session)


def _stored(job: SmallJob) -> str:
    with MemoryStore(job.job.rows, name=job.job.store.url.removeprefix("memory://")) as store:
        return embedding_digest(store)


@pytest.mark.parametrize("cache_rows", [0, 9_000])
def test_two_runs_have_the_bits_of_one_and_carry_its_counters(cache_rows: int) -> None:
    job = SmallJob(cache_rows)
    with job.session() as session:
        first = job.train(session, last=6)
        assert session.run is None
        assert session.carried["samples"] == first.progress.samples == 600
        second = job.train(session, first=6)
        assert (second.progress.steps, second.progress.samples) == (NUM_BATCHES, 1_500)
        assert job.digests(session) == _digests()


def test_rows_are_written_between_two_steps_and_training_goes_on() -> None:
    job = SmallJob()
    with job.session() as session:
        run = session.begin(job.batches(), 0)
        for _ in range(4):
            run.step()
        session.write_rows()
        assert _stored(job) == _digests(4)[1]
        while run.step() is not None:
            pass
        assert session.end().progress.steps == NUM_BATCHES
        assert job.digests(session) == _digests()


def test_a_run_that_ends_early_has_the_bits_of_its_batches() -> None:
    job = SmallJob()
    with job.session() as session:
        run = session.begin(job.batches(), 0)
        for _ in range(4):
            run.step()
        assert session.end_here().progress.samples == 400
        assert job.digests(session) == _digests(4)
        job.train(session, first=4)
        assert job.digests(session) == _digests()


def _train_rescuing(job: SmallJob, *, rescues: bool) -> None:
    with job.session(rescues_rows=rescues) as session:
        try:
            job.train(session)
        finally:
            assert isinstance(session.failure, ZeroDivisionError)
            assert session.run is None


@pytest.mark.parametrize("rescues", [True, False])
def test_an_error_of_the_model_ends_the_session_as_it_is(rescues: bool) -> None:
    job = SmallJob()
    job.break_at(5)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        _train_rescuing(job, rescues=rescues)
    assert (_stored(job) == _digests(5)[1]) is rescues


def _leave_after_a_step(job: SmallJob) -> None:
    with job.session() as session:
        session.begin(job.batches(), 0).step()
        raise KeyError("mine")


def test_an_error_of_the_caller_releases_the_job() -> None:
    namespace = uuid.uuid4().hex
    with pytest.raises(KeyError):
        _leave_after_a_step(SmallJob(namespace=namespace))
    again = SmallJob(namespace=namespace)
    with again.session() as session:  # the one before has written no row
        result = again.train(session)
        assert result.progress.steps == NUM_BATCHES
        assert again.digests(session) == _digests()


def _fail_after_a_checkpoint(job: SmallJob) -> None:
    with job.session() as session:
        run = session.begin(job.batches(), 0)
        for _ in range(6):
            run.step()
        session.checkpoint(6)
        job.break_at(2)
        with session.failing():
            while run.step() is not None:
                pass


def test_a_checkpoint_between_two_steps_is_where_the_next_job_begins(tmp_path: Path) -> None:
    namespace = uuid.uuid4().hex
    with pytest.raises(ZeroDivisionError):
        _fail_after_a_checkpoint(SmallJob(namespace=namespace, folder=tmp_path))
    again = SmallJob(namespace=namespace, folder=tmp_path)
    with again.session() as session:
        assert session.job.checkpoints.first_batch == 6
        result = again.train(session, first=6)
        assert result.progress.samples == 1_500
        assert again.digests(session) == _digests()
