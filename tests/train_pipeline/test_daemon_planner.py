"""Batches planned in a cacher's daemon: the bits of the other planners, and a daemon that refuses or is killed."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bagpipe
from bagpipe.errors import InputError, JobError
from tests.cacher.daemons import Daemon
from tests.distributed.processes import Ended
from tests.lookahead.plan_daemons import plan_daemon
from tests.train_pipeline.rank_jobs import made, on_ranks, shard, values_of
from tests.train_pipeline.small import assert_same, batches, pipeline, progress_all, state_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

ALL = batches(14)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with plan_daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon
        assert not [line for line in daemon.logs if "traceback" in line or "time" not in line]


def trained_with(planner: Any, evaluates: bool = True, **more: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The state after two epochs, and what the evaluations in between scored."""
    scores: list[Any] = []
    with pipeline(planner=planner, **more) as trained:
        for _ in range(2):
            for number, _ in enumerate(trained.train(ALL)):
                if evaluates and number % 5 == 2:
                    scores += trained.evaluate(batches(6, seed=9))
        return state_of(trained), scores


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"cache_rows": 0}, marks=_SLOW), pytest.param({"lookahead": 1}, marks=_SLOW), {"accumulate": 2}],
)
def test_the_bits_are_those_of_the_other_planners(daemon: Daemon, more: dict[str, Any]) -> None:
    expected, expected_scores = trained_with("process", **more)
    for planner in (daemon.url, bagpipe.Cacher(daemon.url)):
        state, scores = trained_with(planner, **more)
        assert_same(state, expected)
        assert all(map(torch.equal, scores, expected_scores))
        assert len(scores) == len(expected_scores) > 0
    assert_same(trained_with(daemon.url, evaluates=False, **more)[0], expected)


def test_two_pipelines_at_once(daemon: Daemon) -> None:
    expected = [trained_with("inline", evaluates=False, cache_rows=rows)[0] for rows in (70, 120)]
    with pipeline(planner=daemon.url, cache_rows=70) as one, pipeline(planner=daemon.url, cache_rows=120) as other:
        for _ in range(2):
            for _ in zip(one.train(ALL), other.train(ALL), strict=True):
                pass
        assert_same(state_of(one), expected[0])
        assert_same(state_of(other), expected[1])


def _of(ended: list[Ended]) -> list[Any]:
    assert [rank.error for rank in ended] == [None] * len(ended)
    return [rank.value for rank in ended]


def _train(rank: int, planner: str) -> Any:
    scores: list[Any] = []
    with made(planner=planner if rank == 0 else "process") as trained:  # rank 0 alone reaches the daemon
        iterator = iter(shard(rank))
        for step in range(12):
            trained.progress(iterator)
            if step % 4 == 1:
                scores += [part.numpy() for part in trained.evaluate(shard(rank, 2 + 3 * rank, seed=9))]
        assert not progress_all(trained, iterator)
        return values_of(state_of(trained)), scores


def test_ranks_have_the_bits_of_the_other_planners(daemon: Daemon) -> None:
    found, expected = (_of(on_ranks(2, _train, planner)) for planner in (daemon.url, "process"))
    for (state, scores), (expected_state, expected_scores) in zip(found, expected, strict=True):
        assert all(np.array_equal(state[name], expected_state[name]) for name in expected_state)
        assert len(scores) == len(expected_scores) > 0
        assert all(map(np.array_equal, scores, expected_scores))


def test_a_daemon_that_refuses_or_is_not_there(tmp_path: Path) -> None:
    """One line, and the store is unchanged."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    secret.chmod(0o600)
    with plan_daemon(tmp_path, "--secret-file", str(secret)) as daemon:
        with pipeline(planner=daemon.url) as trained, pytest.raises(InputError, match=r"secret is missing or wrong$"):
            trained.progress(iter(ALL))
        absent = bagpipe.Cacher(daemon.url, secret_file=str(tmp_path / "none"))
        with pipeline(planner=absent) as trained, pytest.raises(InputError, match=r"^secret_file of the cacher /"):
            trained.progress(iter(ALL))
        with pipeline(planner=bagpipe.Cacher(daemon.url, secret_file=str(secret))) as trained:
            assert len(progress_all(trained, iter(ALL))) == 14
    gone = bagpipe.Cacher(daemon.url, timeout_s=0.2)
    with pipeline(planner=gone) as trained, pytest.raises(InputError, match=r"was not reached within 0\.2 s: "):
        trained.progress(iter(ALL))


def test_a_limit_of_the_daemon_names_the_arguments(tmp_path: Path) -> None:
    with plan_daemon(tmp_path, "--plan-gib", "0.01") as daemon, pipeline(planner=daemon.url) as trained:
        with pytest.raises(InputError, match=r"^cache_rows = 120 on each of 1 ranks, .* may take the planner"):
            trained.progress(iter(ALL))


@pytest.mark.parametrize("at", [1, 6])
def test_a_job_whose_daemon_is_killed_resumes_bit_for_bit(at: int, tmp_path: Path) -> None:
    expected, _ = trained_with("process", evaluates=False)
    where = {"store": f"memory://killed-daemon-{at}", "checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 3}
    with plan_daemon(tmp_path) as daemon:
        with pipeline(planner=daemon.url, **where) as trained:
            rows = trained.train(itertools.cycle(ALL))
            list(itertools.islice(rows, at))
            daemon.kill()
            with pytest.raises(JobError, match=r"which plans for this job, is gone .* resume the job from its checkp"):
                list(rows)
            with pytest.raises(JobError, match="the pipeline has failed"):
                trained.progress(iter(ALL))
        with plan_daemon(tmp_path), pipeline(planner=daemon.url, **where) as trained:
            assert trained.step < 14
            for _ in range(trained.epoch, 2):
                list(trained.train(ALL))
            assert_same(state_of(trained), expected)


def _lose(rank: int, folder: str, url: str, pid: int) -> Any:
    """Kills the daemon in the middle; then resumes with another planner."""
    where: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 2}
    lost = ""
    with suppress(JobError), made(planner=url, **where) as trained:
        iterator = trained.train(itertools.cycle(shard(rank)))
        list(itertools.islice(iterator, 5))
        trained.save()
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        try:
            list(iterator)
        except JobError as error:
            lost = str(error)
            raise
    with made(planner="process", **where) as trained:
        assert 5 <= trained.step < 12
        list(trained.train(shard(rank)))
        return lost, values_of(state_of(trained))


def _whole(rank: int) -> Any:
    with made() as trained:
        progress_all(trained, iter(shard(rank)))
        return values_of(state_of(trained))


def test_ranks_whose_daemon_is_killed_resume_bit_for_bit(tmp_path: Path) -> None:
    with plan_daemon(tmp_path) as daemon:
        folder = str(tmp_path / "checkpoints")
        resumed = _of(on_ranks(2, _lose, folder, daemon.url, daemon.process.pid))
    whole = _of(on_ranks(2, _whole))
    for number, (lost, state) in enumerate(resumed):
        assert lost.startswith("rank 0: " if number else "the cacher at unix:")
        assert "is gone" in lost
        for name, expected in whole[number].items():
            assert np.array_equal(state[name], expected)
