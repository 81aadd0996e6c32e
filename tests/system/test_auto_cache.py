"""A job whose cache grows is killed and resumed with another bound: the bits of a job with a fixed cache."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.system.programs import await_gone, run_forked
from tests.system.resumed import JOB, Resumed, digests

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]


def test_a_killed_job_with_a_growing_cache_resumes(server: EmbeddedServer, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.json"
    done = run_forked([*JOB, "--result", str(fixed)], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert json.loads(fixed.read_text())["cache_rows"] == 500
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, "--cache.rows=auto"])
    died = job.run("--cache.max_rows=450", dies_at="after-commit:2")
    assert died.code == -signal.SIGKILL
    await_gone(died.mark)
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(fixed)
    assert job.resumed_from() == 10
    assert json.loads(job.result.read_text())["cache_rows"] > 500
