"""Several ranks, and models in stages: killed ranks and launchers, restarts by torchrun, another number of ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from bagpipe.store.embedded import EmbeddedServer
from tests.system.programs import Done, Program, await_gone, marked_processes, run_forked
from tests.system.resumed import JOB, Resumed, digests
from tests.system.writes import Writes

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

ENDLESS = ["--data.epochs", "1000000", "--data.eval_fraction", "0"]
STAGES = ["--pipeline.schedule", "1f1b", "--pipeline.stages", "2", "--pipeline.microbatches", "2"]


def torchrun(arguments: list[str], *options: str, dies_at: str = "", ranks: int = 2) -> Program:
    environment = {"BAGPIPE_CRASH_AT": dies_at} if dies_at else {}
    launcher = [f"--nproc-per-node={ranks}", *options, "-m", "trainer"]
    return Program([*launcher, *arguments], environment, module="torch.distributed.run")


def finished(program: Program) -> Done:
    with program:
        done = program.finish()
    await_gone(done.mark)
    return done


def uninterrupted(folder: Path, *more: str, ranks: int = 2) -> tuple[object, ...]:
    """What the job ends with if nothing happens, and no checkpoint is made."""
    done = finished(torchrun([*JOB, *more, "--result", str(folder / "expected.json")], ranks=ranks))
    assert done.code == 0, done.err
    return digests(folder / "expected.json")


def workers(mark: str) -> list[int]:
    """The ranks under a launcher, in no order."""
    found = marked_processes(mark).items()
    return [pid for pid, line in found if " -m trainer " in line and "torch.distributed.run" not in line]


def test_torchrun_restarts_a_job_that_lost_a_rank(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    more = [*ENDLESS, "--run.steps", "300"]
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *more])
    with torchrun(job.line("--checkpoint.every", "20"), "--max-restarts=1") as program:
        writes.wait(8 * 2 * 60)
        os.kill(workers(program.mark)[-1], signal.SIGKILL)
        done = program.finish()
    assert done.code == 0, done.err
    await_gone(done.mark)
    assert digests(job.result) == uninterrupted(tmp_path, *more)
    assert (job.resumed_from() or 0) > 0


def test_ranks_that_die_at_a_checkpoint(server: EmbeddedServer, tmp_path: Path) -> None:
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url])
    assert finished(torchrun(job.line(), dies_at="after-checkpoint-data:3")).code != 0
    done = finished(torchrun(job.line()))
    assert done.code == 0, done.err
    assert digests(job.result) == uninterrupted(tmp_path)
    # One rank alone goes on from where two were; it says what it cannot promise.
    for path in job.checkpoints.glob("*/step-00000022/manifest.json"):
        path.unlink()
    done = run_forked(job.line(), tmp_path)
    assert done.code == 0
    assert "was made by 2 ranks, this job has 1: results are no longer bit-identical" in done.err
    assert json.loads(job.result.read_text())["samples"] == 2700


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_in_stages_goes_on(ranks: int, server: EmbeddedServer, tmp_path: Path) -> None:
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *STAGES])
    if ranks == 1:
        assert job.run(dies_at="after-checkpoint-data:3").code == -signal.SIGKILL
        assert job.run().code == 0
        assert run_forked([*JOB, *STAGES, "--result", str(tmp_path / "expected.json")], tmp_path).code == 0
        assert digests(job.result) == digests(tmp_path / "expected.json")
    else:
        assert finished(torchrun(job.line(), dies_at="after-checkpoint-data:3")).code != 0
        done = finished(torchrun(job.line()))
        assert done.code == 0, done.err
        assert digests(job.result) == uninterrupted(tmp_path, *STAGES)
    assert job.resumed_from() is not None


def test_a_single_rank_does_not_outlive_its_launcher(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *ENDLESS])
    with torchrun(job.line(), ranks=1) as program:
        writes.wait(200)
        os.kill(program.pid, signal.SIGKILL)
        done = program.finish()
    await_gone(done.mark)
