"""How many jobs a daemon serves, which ones make room, and what others learn of them."""

from __future__ import annotations

import pytest

from bagpipe.client.agreement import job_label
from bagpipe.errors import InputError, JobError
from cacher.server import Limits
from tests.cacher.daemons import all_batches, config, remote, served, spec_of


def test_too_many_jobs_are_refused(listen: str) -> None:
    job = config()
    with served(job, listen, limits=Limits(max_jobs=1)):
        with remote(listen, job), pytest.raises(JobError, match="serves 1 jobs already, at most 1"):
            remote(listen, job).__enter__()
        assert len(all_batches(listen, job)[0]) == 18  # there is room again


def test_a_job_that_asks_for_nothing_makes_room(listen: str) -> None:
    job = config()
    with served(job, listen, limits=Limits(max_jobs=2, start_timeout_s=0.0)):
        with remote(listen, job) as busy, remote(listen, job) as idle:
            first = next(busy.batches("train", spec_of(job, busy.schema)))
            assert first.batch.index == 0
            assert len(all_batches(listen, job)[0]) == 18
            with pytest.raises(JobError, match="asked for nothing in 0 s and made room for another"):
                next(idle.batches("train", spec_of(job, idle.schema)))
    with served(job, listen, limits=Limits(max_jobs=1)), remote(listen, job):
        with pytest.raises(JobError, match="serves 1 jobs already"):  # not yet
            remote(listen, job).__enter__()


def test_nobody_else_learns_the_id_of_a_job(listen: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever knows it could enter as one of its ranks."""
    job, job_id = config(), "0123456789abcdef"
    caplog.set_level("DEBUG")
    with served(job, listen) as server:
        with remote(listen, job, rank=0, world_size=2, job_id=job_id):
            with pytest.raises(InputError, match=f"rank 0 of job {job_label(job_id)} belongs to another process"):
                remote(listen, job, rank=0, world_size=2, job_id=job_id).__enter__()
        assert job_id not in repr(server.jobs.runs())
    assert caplog.records
    assert job_id not in "".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
