"""Ranks that reconnect: to a restarted cacher, after the end of their run, or after the cacher gave them up."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import PROTOCOL_VERSION, settings_of
from bagpipe.client.link import Credentials, Link
from bagpipe.config.sections import Config, DataConfig
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.rank_batch import RankBatch
from cacher.run import Run
from cacher.server import Limits
from tests.cacher.daemons import (
    CuttingProxy,
    Daemon,
    assert_same_batches,
    config,
    planned_batches,
    remote,
    served,
    spec_of,
)

JOB = config()


@contextmanager
def rank_through(url: str, rank: int) -> Iterator[None]:
    """A rank that connects to another cacher after it received all batches of run 0 and their end."""
    hello = pb.Hello(
        protocol=PROTOCOL_VERSION,
        job_id="job",
        instance="back",
        rank=rank,
        world_size=2,
        credits=3,
        settings=json.dumps(settings_of(JOB)),
    )
    with Link(parse_address(url), Credentials()) as link, remote(url, JOB, job_id="schema") as other:
        link.put(hello=hello)
        received = link.messages()
        assert next(received).WhichOneof("kind") == "welcome"
        spec = json.dumps(dataclasses.asdict(spec_of(JOB, other.schema, 2)))
        for _ in range(2):  # its stream can break more than once
            start = pb.Start(run=0, phase="train", spec=spec, next_batch=18, watermark=18, ended=True)
            link.put(start=start)
        # Messages are processed in order: an answer to this one means that the earlier ones were processed.
        link.put(start=pb.Start(run=1, phase="eval", spec=spec))
        assert next(received).rank_batches[0].run == 1
        yield
        link.put(leave=pb.Leave())
        link.finish()


def test_no_wait_for_a_rank_that_had_its_end(listen: str) -> None:
    """It reconnects before the other rank asks for the run."""
    with served(JOB, listen), rank_through(listen, 1):
        with remote(listen, JOB, rank=0, world_size=2, job_id="job") as source:
            rank_batches = list(source.batches("train", spec_of(JOB, source.schema, 2)))
    assert_same_batches(rank_batches, planned_batches(JOB, 2)[0])


def test_a_wait_stops_when_the_rank_reports_its_end(listen: str) -> None:
    """It reconnects while the planner waits for it."""
    with served(JOB, listen), remote(listen, JOB, rank=0, world_size=2, job_id="job") as source:
        rank_batches = source.batches("train", spec_of(JOB, source.schema, 2))
        taken = [next(rank_batches) for _ in range(3)]
        with rank_through(listen, 1):
            assert_same_batches(taken + list(rank_batches), planned_batches(JOB, 2)[0])


@pytest.mark.multiproc
def test_a_daemon_restarted_after_one_rank_finished(tmp_path: Path, listen: str) -> None:
    """Before the kill, rank 0 has a few batches and no route to the daemon; rank 1 has all batches and the end."""
    expected = planned_batches(JOB, 2)
    through, done = threading.Event(), threading.Event()

    def take_all() -> list[RankBatch]:
        with remote(listen, JOB, rank=1, world_size=2, job_id="job") as source:
            rank_batches = list(source.batches("train", spec_of(JOB, source.schema, 2)))
            through.set()
            assert done.wait(60)
            return rank_batches

    cuts = [40_000, *[1] * 10_000]
    with CuttingProxy(tmp_path / "proxy.sock", tmp_path / "cacher.sock", cuts) as proxy, ThreadPoolExecutor(1) as pool:
        with Daemon(JOB, listen) as daemon:
            source = remote(proxy.url, JOB, rank=0, world_size=2, job_id="job", credits=30)
            source.__enter__()
            rank_batches = source.batches("train", spec_of(JOB, source.schema, 2))
            ours = pool.submit(take_all)
            assert through.wait(60)
            daemon.kill()
        assert source.statistics().current < 18
        proxy._cuts.clear()
        with Daemon(JOB, listen):
            assert_same_batches(list(rank_batches), expected[0])
            done.set()
            assert_same_batches(ours.result(), expected[1])
            source.close()


def test_the_wait_for_a_rank_that_left_is_bounded(listen: str) -> None:
    with served(JOB, listen, limits=Limits(grace_s=0.2)):
        with remote(listen, JOB, rank=0, world_size=2, job_id="job") as source:
            rank_batches = source.batches("train", spec_of(JOB, source.schema, 2), next_batch=2)
            assert_same_batches(list(rank_batches), planned_batches(JOB, 2)[0][2:])


def test_other_data_under_the_same_name_is_refused(tmp_path: Path, listen: str) -> None:
    """The trainer is in the middle of the old data's batches."""
    line = "\t".join(["1", *["3"] * 13, *["af"] * 26]) + "\n"
    path = tmp_path / "day"
    path.write_text(line * 100)
    data = DataConfig(format="criteo-tsv", path=str(path), batch_size=10, eval_fraction=0.0, workers=0)
    job = Config(data=data, cacher=JOB.cacher, oracle=JOB.oracle, cache=JOB.cache, run=JOB.run)
    with served(job, listen):
        source = remote(listen, job)
        source.__enter__()
        rank_batches = source.batches("train", spec_of(job, source.schema))
        assert next(rank_batches).batch.index == 0
    path.write_text(line.replace("af", "ae") * 100)
    words = rf"^the data has changed since the trainer began: {path} has other content: the block at byte 0"
    with served(job, listen), pytest.raises(JobError, match=words):
        list(rank_batches)
    source.close()


def test_a_rank_given_up_does_not_restart_the_job(listen: str, tmp_path: Path) -> None:
    with served(JOB, listen, limits=Limits(grace_s=0.1)):
        with remote(listen, JOB, rank=0, world_size=2, job_id="job") as other:
            with CuttingProxy(tmp_path / "proxy.sock", tmp_path / "cacher.sock", []) as proxy:
                lost = remote(proxy.url, JOB, rank=1, world_size=2, job_id="job")
                lost.__enter__()
            with pytest.raises(JobError, match=r"^rank 1 was lost"):
                list(other.batches("train", spec_of(JOB, other.schema, 2)))
        with CuttingProxy(tmp_path / "proxy2.sock", tmp_path / "cacher.sock", []):
            (tmp_path / "proxy.sock").unlink()
            (tmp_path / "proxy2.sock").rename(tmp_path / "proxy.sock")
            with pytest.raises(JobError, match=r"^the job was given up: rank 1 was lost and not back within 0\.1 s$"):
                list(lost.batches("train", spec_of(JOB, lost.schema, 2)))
        lost.close()


def test_a_single_rank_can_return_after_it_was_given_up(
    listen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(JOB, listen, limits=Limits(grace_s=0.01)):
        with CuttingProxy(tmp_path / "proxy.sock", tmp_path / "cacher.sock", [40_000, *[1] * 10_000]) as proxy:
            with remote(proxy.url, JOB) as source:
                rank_batches = source.batches("train", spec_of(JOB, source.schema))
                while "rank given up" not in caplog.messages:
                    pass
                proxy._cuts.clear()
                assert_same_batches(list(rank_batches), planned_batches(JOB)[0])


def test_runs_of_a_job_are_bounded(listen: str) -> None:
    """The other rank never connects, so no run ends."""
    with served(JOB, listen), remote(listen, JOB, rank=0, world_size=2, job_id="job") as source:
        runs = [source.batches("train", spec_of(JOB, source.schema, 2)) for _ in range(4)]
        with pytest.raises(JobError, match=r"^the job has 3 phases under way already, at most 3$"):
            next(runs[3])


def test_a_defect_of_the_cacher_is_reported(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported, and no state is left behind."""

    def fail(run: Run) -> None:
        raise RuntimeError("can't start new thread")

    with served(JOB, listen) as server:
        with monkeypatch.context() as patched, remote(listen, JOB) as source:
            patched.setattr(Run, "start", fail)
            with pytest.raises(JobError, match=r"^the cacher failed: RuntimeError: can't start new thread$"):
                next(source.batches("train", spec_of(JOB, source.schema)))
        with remote(listen, JOB) as source:
            assert len(list(source.batches("train", spec_of(JOB, source.schema)))) == 18
            assert server.jobs.counts()[0] == 1


def test_a_planner_too_large_is_refused(listen: str) -> None:
    job = config(rows=1 << 29)
    with served(job, listen), remote(listen, job, rank=0, world_size=2, job_id="job") as source:
        with pytest.raises(InputError, match=r"cache\.rows = 536870912 on each of 2 ranks may take the planner 74 GiB"):
            next(source.batches("train", spec_of(job, source.schema, 2)))
