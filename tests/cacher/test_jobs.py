"""How many jobs a daemon serves, which ones make room, and what others learn of them and can do to them."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import grpc
import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import PROTOCOL_VERSION, SECRET_METADATA, job_label
from bagpipe.client.codec import encode_rank_batch
from bagpipe.config.sections import Config
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.rank_batch import PlanSpan, RankBatch
from cacher.planning import PlannedData
from cacher.security import Access
from cacher.server import Limits
from tests.cacher.daemons import all_batches, assert_same_batches, config, planned_batches, remote, served, spec_of
from tests.data.files import criteo_lines
from tests.effort import some_of


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


def text_job(folder: Path, **data: Any) -> Config:
    """Four files of lines, every fifth of which is malformed."""
    days = folder / "days"
    days.mkdir()
    for day in range(4):
        lines = criteo_lines(60, seed=day).splitlines(keepends=True)
        (days / f"day_{day}").write_bytes(b"".join(line if n % 5 else b"bad\n" + line for n, line in enumerate(lines)))
    text = {"format": "criteo-tsv", "path": str(days), "bad_rows": "skip", "eval_fraction": 0.0, "limit": 0}
    return config(batch_size=9, **{**text, **data})


def plain(rank_batch: RankBatch) -> bytes:
    """Its bytes, without the times."""
    span = PlanSpan(read_start_ns=0, plan_start_ns=0, plan_end_ns=0)
    return b"".join(map(bytes, encode_rank_batch(dataclasses.replace(rank_batch, span=span))))


def lies(states: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """States that say of some place of the data that it is before the batch after `states[5]`."""
    true, late = states[5], states[-2]
    here = {"batch": true["batch"]}
    yield {**late, **here}
    yield {**states[1], **here}
    for name in ("epoch", "segment", "block", "row", "first_row", "skipped", "skipped_before"):
        yield {**true, name: true[name] + 1}
        yield {**true, name: 10**6}
    yield {**true, "batch": 0}
    yield {**true, "row": -1}
    yield {**true, "row": 1e300}
    yield {**true, "first_row": 10**1000}
    yield {**true, "order": [1]}
    yield {**true, "share": [["x"]]}


@pytest.mark.parametrize("options", some_of([{}, {"shuffle": True}, {"shuffle": True, "shuffle_buffer": 50}], {2}))
def test_a_job_with_false_reader_states_is_alone_with_them(
    tmp_path: Path, listen: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It lies before, while and after another job asks for the same batches, from the beginning and from the middle:
    the other's batches are those of a daemon that serves it alone.
    """
    job = text_job(tmp_path, **options)
    expected = planned_batches(job)[0]
    states = [rank_batch.batch.reader_state or {} for rank_batch in expected]
    false = [json.loads(json.dumps(state)) for state in lies(states)]

    def lie(state: Mapping[str, Any]) -> None:
        with remote(listen, job) as liar, suppress(InputError):
            asked = {"first_batch": 6, "reader_state": state}
            deque(liar.batches("train", spec_of(job, liar.schema), **asked), maxlen=0)

    def honest(between: Iterable[Mapping[str, Any]], first_batch: int = 0) -> list[bytes]:
        with remote(listen, job) as source:
            state = states[first_batch - 1] if first_batch else None
            asked = {"first_batch": first_batch, "reader_state": state}
            batches, found = source.batches("train", spec_of(job, source.schema), **asked), []
            for rank_batch, lying in zip_longest(batches, between):
                if lying is not None:
                    lie(lying)
                if rank_batch is not None:
                    found.append(plain(rank_batch))
        return found

    data = PlannedData(job.data, job.run.seed)
    resumed = list(data.batches("train", spec_of(job, data.schema), first_batch=6, reader_state=states[5]))
    assert [batch.batch.index for batch in resumed] == list(range(6, len(expected)))
    with served(job, listen) as server:
        for state in false[:4]:
            lie(state)
        assert honest(false) == [plain(rank_batch) for rank_batch in expected]
        assert honest(false[:6], first_batch=6) == [plain(rank_batch) for rank_batch in resumed]
        assert server.counters.totals().dropped == 0
    assert not [record for record in caplog.records if record.exc_info], "a state is no defect of the daemon"
