"""Resumed jobs of several ranks or stages: killed ranks and launchers, torchrun restarts, changed world size.

Only tests of the launcher start one; the others fork their ranks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.util import failpoints as crash_points
from tests.distributed.processes import Ended, run_ranks
from tests.system.jobs import change
from tests.system.programs import await_gone, ranks_of, run_forked, torchrun
from tests.system.resumed import JOB, Resumed, digests
from tests.system.test_ranks import digests_of, run_to_the_end, whole_job
from tests.system.writes import Writes

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

ENDLESS = ["--data.epochs", "1000000", "--data.eval_fraction", "0"]
STAGES = ["--pipeline.schedule", "1f1b", "--pipeline.stages", "2", "--pipeline.microbatches", "2"]


def config_of(arguments: Sequence[str]) -> Config:
    return parse_config(list(arguments), "test").config


def dying_job(membership: Membership, config: Config, point: str) -> dict[str, Any]:
    """One rank, whose process dies at a failpoint."""
    os.environ["BAGPIPE_CRASH_AT"] = point
    importlib.reload(crash_points)  # it read the fork server's environment when it was imported
    return whole_job(membership, config)


def ranks_that_die(arguments: Sequence[str], point: str, ranks: int = 2) -> list[Ended]:
    """The first rank at the failpoint is killed; the others lose their peer, or die there too."""
    ends = run_ranks(ranks, dying_job, change(config_of(arguments), run__peer_timeout_s=20.0), point)
    assert -signal.SIGKILL in [end.code for end in ends]
    assert [end.value for end in ends] == [None] * ranks
    return ends


def numbers(results: list[dict[str, Any]]) -> tuple[object, ...]:
    """The values of `digests`, from the results of all ranks."""
    return (*digests_of(results), results[0]["loss"], results[0]["auc"])


def uninterrupted(*more: str, ranks: int = 2) -> tuple[object, ...]:
    """Final numbers of the uninterrupted job of several ranks without checkpoints."""
    return numbers(run_to_the_end(config_of([*JOB, *more]), ranks))


def test_torchrun_restarts_a_job_that_lost_a_rank(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    more = [*ENDLESS, "--run.steps", "160"]
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *more])
    with torchrun(job.line("--checkpoint.every", "20"), "--max-restarts=1", forked=tmp_path) as program:
        writes.wait(8 * 2 * 40)
        os.kill(ranks_of(program)[-1], signal.SIGKILL)
        done = program.finish()
    assert done.code == 0, done.err
    await_gone(done.mark)
    assert digests(job.result) == uninterrupted(*more)
    assert (job.resumed_from() or 0) > 0


@pytest.mark.slow
def test_ranks_that_limit_the_norm_of_rows_die_at_a_checkpoint(server: EmbeddedServer, tmp_path: Path) -> None:
    """Resumed, they end as direct mode does, whose rows have other owners."""
    limit = ["--optim.clip_norm", "0.01", "--optim.clip_scope", "all"]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *limit])
    ranks_that_die(job.settings(), "after-checkpoint-data:3")
    results = run_to_the_end(config_of(job.settings()), 2)
    assert numbers(results) == uninterrupted(*limit, "--cache.rows", "0")
    assert (results[0]["resumed_from"] or 0) > 0


def test_ranks_that_die_at_a_checkpoint(server: EmbeddedServer, tmp_path: Path) -> None:
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url])
    ranks_that_die(job.settings(), "after-checkpoint-data:3")
    results = run_to_the_end(config_of(job.settings()), 2)
    assert numbers(results) == uninterrupted()
    assert (results[0]["resumed_from"] or 0) > 0
    # One rank resumes a job of two, with a warning about changed results.
    for path in job.checkpoints.glob("*/step-00000022/manifest.json"):
        path.unlink()
    done = run_forked(job.line(), tmp_path)
    assert done.code == 0
    assert "was made by 2 ranks, this job has 1: results are no longer bit-identical" in done.err
    assert json.loads(job.result.read_text())["samples"] == 2700


@pytest.mark.parametrize(
    ("ranks", "schedule", "rows_delay", "chunks"),
    [
        pytest.param(1, "1f1b", 0, "", marks=pytest.mark.slow),
        pytest.param(2, "1f1b", 0, "", marks=pytest.mark.slow),
        pytest.param(1, "pipeoptim", 0, "", marks=pytest.mark.slow),
        pytest.param(2, "pipedream-2bw", 0, "", marks=pytest.mark.slow),
        (2, "dynamic", 0, ""),
        (1, "spectrain", 1, ""),
        (2, "pipeoptim", 1, ""),
        pytest.param(1, "spectrain", 1, "--dense.budget_bytes=20000", marks=pytest.mark.slow),
        pytest.param(2, "pipeoptim", 1, "--dense.state=host", marks=pytest.mark.slow),
    ],
)
def test_a_staged_job_resumes(
    ranks: int, schedule: str, rows_delay: int, chunks: str, server: EmbeddedServer, tmp_path: Path
) -> None:
    """As a job without chunks that nobody stopped."""
    stages = ["--pipeline.schedule", schedule, *STAGES[2:]]
    if rows_delay:
        stages += ["--pipeline.rows_delay", "1", "--optim.dense", "adam", "--cache.rows", "900"]
        stages += [
            "--optim.schedule",
            "polynomial",
            "--optim.schedule_length",
            "9",
        ]  # forwards predict by the rate of a step
        if not chunks:  # sums of factors belong to the batch of a step, which forwards precede
            stages += ["--optim.precondition", "kfac", "--optim.kfac_lag", "1", "--optim.kfac_damping", "0.1"]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *stages, *chunks.split()])
    if ranks == 1:
        assert job.run(dies_at="after-checkpoint-data:3").code == -signal.SIGKILL
        assert job.run().code == 0
        assert run_forked([*JOB, *stages, "--result", str(tmp_path / "expected.json")], tmp_path).code == 0
        assert digests(job.result) == digests(tmp_path / "expected.json")
        assert job.resumed_from() is not None
    else:
        ranks_that_die(job.settings(), "after-checkpoint-data:3")
        results = run_to_the_end(config_of(job.settings()), 2)
        assert numbers(results) == uninterrupted(*stages)
        assert results[0]["resumed_from"] is not None


@pytest.mark.parametrize(
    ("schedule", "replicas", "more"),
    [
        (
            "pipeoptim",
            "2,1",
            [
                *("--pipeline.rows_delay", "1", "--cache.rows", "900"),
                *("--optim.precondition", "kfac", "--optim.kfac_lag", "1", "--optim.kfac_damping", "0.1"),
            ],
        ),
        pytest.param("dynamic", "1,2", [], marks=pytest.mark.slow),
    ],
)
def test_stages_on_ranks_of_their_own_number_resume(
    schedule: str, replicas: str, more: list[str], server: EmbeddedServer, tmp_path: Path
) -> None:
    """Killed on three ranks, resumed by one process that runs all parts: the bits of an uninterrupted job."""
    stages = ["--pipeline.schedule", schedule, *STAGES[2:], "--pipeline.replicas", replicas, "--optim.dense", "adam"]
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *stages, *more])
    ranks_that_die(job.settings(), "after-checkpoint-data:3", ranks=3)
    assert job.run().code == 0
    assert job.resumed_from() is not None
    assert digests(job.result) == uninterrupted(*stages, *more, ranks=3)


def test_a_job_starts_from_one_of_other_ranks_and_stages(server: EmbeddedServer, tmp_path: Path) -> None:
    """One rank from one, two stages on two ranks from one, and one rank from those: results agree but for rounding."""

    def started(name: str, source: Resumed, *more: str) -> tuple[Resumed, dict[str, Any]]:
        (tmp_path / name).mkdir()
        start = ["--store.url", server.url, "--checkpoint.start_from", str(source.checkpoints), *more]
        job = Resumed(folder=tmp_path / name, arguments=start)
        if more:
            result: dict[str, Any] = run_to_the_end(config_of(job.settings()), 2)[0]
        else:
            assert job.run().code == 0
            result = json.loads(job.result.read_text())
        assert {item["fate"] for item in result["started_from"]["items"] if item["kind"] != "job"} == {"taken"}
        return job, {name: result[name] for name in ("loss", "auc", "logloss")}

    first = Resumed(folder=tmp_path, arguments=["--store.url", server.url])
    assert first.run().code == 0
    whole, expected = started("whole", first)
    staged, found = started("staged", first, *STAGES)
    assert found == pytest.approx(expected, rel=1e-5)
    assert started("after staged", staged)[1] == pytest.approx(started("after whole", whole)[1], rel=1e-5)


def test_a_single_rank_does_not_outlive_its_launcher(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *ENDLESS])
    with torchrun(job.line(), ranks=1, forked=tmp_path) as program:
        writes.wait(200)
        os.kill(program.pid, signal.SIGKILL)
        await_gone(program.mark)
