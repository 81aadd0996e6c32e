"""A job whose planner is in shards has the numbers of one whose planner is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.programs import run_forked
from tests.system.resumed import JOB, digests

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]


def test_a_job_whose_planner_is_in_shards_has_the_same_digests(tmp_path: Path) -> None:
    found = []
    for flags in ([], ["--cacher.shards", "2"]):
        result = tmp_path / "result.json"
        done = run_forked([*JOB, *flags, "--result", str(result)], tmp_path)
        assert (done.code, done.err) == (0, ""), done.err
        found.append(digests(result))
    assert found[0] == found[1]
