"""The fuzz harness on a toy trainer: exact jobs and refusals pass, and each kind of defect is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.fuzz import twin as twin_module
from tests.harness.fuzz.draw import DIRECT, Draw, Kill, Twin
from tests.harness.fuzz.drawing import draw
from tests.harness.fuzz.site import Site
from tests.harness.fuzz.toys import CAPACITY, TRAINER
from tests.harness.fuzz.trial import Verdict, run_trial

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

KILLS = (
    Kill(point="after-fetch", times=5),
    Kill(point="after-fetch", times=2, signal="SIGINT"),
    Kill(point="after-fetch", times=99),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("toys")
    (folder / "trainer").mkdir()
    (folder / "trainer" / "__init__.py").touch()
    (folder / "trainer" / "cli.py").write_text(TRAINER)
    (folder / "toy_capacity.py").write_text(CAPACITY)
    with Site(folder, folder, modules=("trainer.cli",), capacity_program="toy_capacity") as site:
        yield site


def toy(how: str, world_size: int = 1) -> Draw:
    some = draw(1, 0)
    twins = (
        dataclasses.replace(DIRECT, cacher="own"),
        Twin(name="cached", share=0.0, cacher="own"),
        Twin(name="resumed", share=0.5, cacher="own", has_checkpoints=True, kills=KILLS, again=True),
    )
    job = {**dict(some.job), "model.factory": how, "run.dtype": "float32", "run.steps": "0"}
    return dataclasses.replace(some, world_size=world_size, job=tuple(job.items()), twins=twins)


def run(site: Site, how: str, world_size: int = 1) -> Verdict:
    verdict = run_trial(toy(how, world_size), site)
    shutil.rmtree(verdict.folder)
    return verdict


def test_an_exact_job_passes(site: Site) -> None:
    verdict = run(site, "exact")
    assert verdict.problem == ""
    # The third kill's point is never reached, so that start ends by itself; then the job is started again.
    assert (verdict.num_starts, verdict.num_kills, verdict.num_comparisons) == (1 + 1 + 4, 2, 2)


def test_twins_start_from_the_job_before_them(site: Site) -> None:
    item = toy("exact")
    before = Twin(name="before", settings=(("run.steps", "3"),), cacher="own", has_checkpoints=True)
    twins = tuple(dataclasses.replace(twin, has_checkpoints=True) for twin in item.twins)
    verdict = run_trial(dataclasses.replace(item, twins=twins, before=before), site)
    assert (verdict.problem, verdict.end, verdict.num_comparisons) == ("", "12 steps", 2)
    starts = [json.loads((Path(verdict.folder) / name / "result-0.json").read_text()) for name in ("before", "direct")]
    assert starts[0]["dense_digest"] != starts[1]["dense_digest"]
    shutil.rmtree(verdict.folder)


def test_a_refusal_of_all_twins_passes(site: Site) -> None:
    verdict = run(site, "refuses")
    assert verdict.problem == ""
    assert "is not to our taste" in verdict.end


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("differs", "cached: dense_digest"),
        ("misjudges", "cached: evaluations [True] for [False]"),
        ("forgets", "resumed: dense_digest"),
        ("babbles", "cached: start 0: rank 0 ended with a traceback: RuntimeError: a defect"),
        ("chatters", "cached: start 0: rank 0 printed 'GOAWAY'"),
        ("refuses-cache", "cached: ended with code 2: error: …"),
        ("sticks", "cached: start 0: not ended after 2 s"),
    ],
)
def test_a_defect_is_seen(site: Site, how: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "sticks":
        monkeypatch.setattr(twin_module, "START_TIMEOUT_S", 2.0)
    verdict = run(site, how)
    assert words in verdict.problem
    assert all("-m trainer" in command for command in verdict.commands)


def test_files_of_the_commands_are_left(site: Site) -> None:
    verdict = run_trial(toy("differs"), site)
    (command,) = [command for command in verdict.commands if "cache.rows=7" in command]
    assert Path(command.rpartition(" ")[2]).exists()
    shutil.rmtree(verdict.folder)
