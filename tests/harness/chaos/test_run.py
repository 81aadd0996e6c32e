"""The chaos harness on toy jobs: exact ones pass under all faults, and each kind of defect is detected."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.harness.chaos import run as chaos_run
from tests.harness.chaos.jobs import JOBS, ChaosJob
from tests.harness.chaos.run import Reference, Run, Verdict, draw_job, make_reference
from tests.harness.chaos.toys import DAEMON, TRAINER
from tests.harness.faults import kinds_named
from tests.harness.zygote import Zygote

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

NUM_BATCHES = 40


def toy(how: str) -> ChaosJob:
    return ChaosJob(name="toy", num_batches=NUM_BATCHES, flags=("--model.factory", how))


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    folder = tmp_path_factory.mktemp("toys")
    for package, text in (("trainer", TRAINER), ("cacher", DAEMON)):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / "cli.py").write_text(text)
    with Zygote(["trainer.cli", "cacher.cli"], folder) as zygote:
        yield zygote


@pytest.fixture(scope="module")
def reference(zygote: Zygote) -> Reference:
    return make_reference(toy("exact"), zygote)


def run_of(zygote: Zygote, reference: Reference, how: str, kinds: str, seed: int) -> Verdict:
    run = Run(seed=seed, job=toy(how), kinds=kinds_named(kinds), zygote=zygote, reference=reference)
    try:
        return run.go()
    finally:
        shutil.rmtree(run.folder)


@pytest.mark.parametrize(
    "kinds",
    [
        "kill-trainer,kill-rank,kill-all",
        "kill-store,lose-store,flush-store,rewind-store",
        "kill-point",
        "zombie",
        "tear-checkpoint",
        "network,pause-rank,pause-store",
        "delete-row,kill-daemon,pause-daemon",
    ],
)
def test_an_exact_job_passes(zygote: Zygote, reference: Reference, kinds: str) -> None:
    verdicts = [run_of(zygote, reference, "exact", kinds, seed) for seed in range(2)]
    assert [verdict.problem for verdict in verdicts] == [""] * 2
    assert sum(verdict.num_fired for verdict in verdicts) > 0


@pytest.mark.parametrize(
    ("how", "kinds", "words"),
    [
        ("forgets", "kill-trainer", "dense_digest"),
        ("babbles", "kill-store", "ended with a traceback"),
        ("unchecked", "delete-row", "dense_digest"),
        ("unfenced", "zombie", "dense_digest"),
        ("sticks", "kill-store", "not ended after 1 s"),
    ],
)
def test_a_defect_is_seen(
    zygote: Zygote, reference: Reference, how: str, kinds: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "sticks":
        monkeypatch.setattr(chaos_run, "START_TIMEOUT_S", 1.0)
    for seed in range(20):
        if problem := run_of(zygote, reference, how, kinds, seed).problem:
            assert words in problem
            return
    raise AssertionError("no run found anything")


def test_a_seed_determines_the_job() -> None:
    drawn = [draw_job(seed, JOBS) for seed in range(200)]
    assert drawn == [draw_job(seed, JOBS) for seed in range(200)]
    assert set(drawn) == set(JOBS)
