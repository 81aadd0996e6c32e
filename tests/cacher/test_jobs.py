"""How many jobs a daemon serves, which ones make room, and what others learn of them and can do to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import PROTOCOL_VERSION, SECRET_METADATA, job_label
from bagpipe.errors import InputError, JobError
from cacher.security import Access
from cacher.server import Limits
from tests.cacher.daemons import all_batches, assert_same_batches, config, planned_batches, remote, served, spec_of


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


def test_who_has_the_secret_but_not_the_id_is_another_job(listen: str) -> None:
    """Guesses at the id, and the label that logs and metrics show, reach neither kind of job."""
    job, job_id, secret = config(), "0123456789abcdef0123456789abcdef", "a secret of some length"
    guesses = [job_label(job_id), job_id[:-1], job_id.upper(), f" {job_id}", job_id + "0", "0" * 32]
    expected = planned_batches(job)[0]
    with served(job, listen, access=Access(secret=secret), limits=Limits(max_jobs=100)) as server:
        with grpc.insecure_channel(parse_address(listen).target) as channel:

            def plan(name: str) -> grpc.Call:
                """A planner's stream that stays open."""
                hello = pb.PlanRequest(hello=pb.PlanHello(protocol=PROTOCOL_VERSION, job_id=name))
                call = channel.stream_stream("/bagpipe.v1.Cacher/Plan")(
                    _then_wait(hello.SerializeToString(), closing), metadata=[(SECRET_METADATA, secret)]
                )
                assert pb.PlanReply.FromString(next(call)).WhichOneof("kind") == "welcome"
                return call

            closing = threading.Event()
            calls = [plan(job_id)]
            with remote(listen, job, job_id=job_id, secret=secret) as source:
                batches = source.batches("train", spec_of(job, source.schema))
                taken = [next(batches)]
                for guess in guesses:
                    calls.append(plan(guess))
                    [found] = all_batches(listen, job, job_id=guess, secret=secret)  # from the first batch on
                    assert_same_batches(found, expected)
                    taken.append(next(batches))
                assert server.jobs.counts() == (1, 1)
                assert server.snapshot().jobs == 2 + len(guesses), "no two planners are one job"
                assert_same_batches([*taken, *batches], expected)
                assert all(call.is_active() for call in calls)
            closing.set()


def _then_wait(message: bytes, closing: threading.Event) -> Iterator[bytes]:
    yield message
    closing.wait()
