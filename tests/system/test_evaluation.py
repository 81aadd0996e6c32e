"""Evaluations during training: they change no bit of it, and say when it ends."""

from __future__ import annotations

import dataclasses
import json
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagpipe.checkpoint.best import read_best
from bagpipe.config.sections import Config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.effort import some_of
from tests.system.jobs import change, largest_batch
from tests.system.programs import await_gone, run_forked
from tests.system.resumed import JOB, Resumed, digests
from tests.system.staging import staged
from tests.system.test_ranks import digests_of, run_to_the_end
from trainer.job import run_job
from trainer.metrics import METRICS

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

MakeConfig = Callable[..., Config]


def _result(config: Config, **values: object) -> dict[str, Any]:
    config = change(config, store__namespace=uuid.uuid4().hex, **values)
    return dataclasses.asdict(run_job(config))


def _digests(result: dict[str, Any]) -> tuple[object, ...]:
    return tuple(result[name] for name in ("dense_digest", "embedding_digest", "steps", "samples", "auc", "ne"))


@pytest.mark.parametrize("mode", some_of(["cached", "direct", "averaged"], {0, 2}))
def test_training_is_the_same_with_and_without(mode: str, clicks: MakeConfig, redis_servers: tuple[str, ...]) -> None:
    config = change(clicks(eval_fraction=0.2), store__url=redis_servers[0])
    config = change(config, cache__rows=0 if mode == "direct" else largest_batch(config) + 7)
    if mode == "averaged":
        config = change(config, optim__ema_decay=0.9, optim__ema_evaluate=True)
    without = _result(config)
    evaluated = _result(config, eval__every=4)
    assert _digests(evaluated) == _digests(without)
    steps = [evaluation["step"] for evaluation in evaluated["evaluations"]]
    assert steps == [*range(4, without["steps"], 4), without["steps"]]
    assert without["evaluations"] == []
    # The evaluation before batch 16 is that of a job of 16 batches: rows that the ones before kept are current.
    for number, step in ((1, 8), (3, 16)):
        short = _result(config, run__steps=step)
        assert evaluated["evaluations"][number] == {"step": step, **{name: short[name] for name in METRICS}}


def test_a_part_of_the_held_out_examples_is_scored_during_training(
    clicks: MakeConfig, redis_servers: tuple[str, ...]
) -> None:
    config = change(clicks(eval_fraction=0.4), store__url=redis_servers[0], cache__rows=300)
    without, evaluated = _result(config), _result(config, eval__every=6, eval__batches=2)
    assert _digests(evaluated) == _digests(without)
    assert all(item["step"] % 6 == 0 for item in evaluated["evaluations"])
    assert evaluated["evaluations"][0]["ne"] != _result(config, run__steps=6)["ne"]


def test_training_that_ends_early_has_the_bits_of_its_steps(clicks: MakeConfig, redis_servers: tuple[str, ...]) -> None:
    """No evaluation is better than the first by 2, which no AUC reaches."""
    config = change(clicks(eval_fraction=0.2), store__url=redis_servers[0], cache__rows=300)
    stopped = _result(config, eval__every=3, eval__patience=2, eval__min_delta=2.0)
    assert (stopped["early_stopped"], stopped["steps"], stopped["best_step"]) == (True, 9, 3)
    assert _digests(stopped) == _digests(_result(config, run__steps=9))


@pytest.mark.parametrize("schedule", some_of(["none", "1f1b", "chimera"], {1}))
def test_ranks_evaluate_together(schedule: str, clicks: MakeConfig) -> None:
    config = change(clicks(eval_fraction=0.2), cache__rows=200, store__url="", run__steps=10)
    if schedule != "none":
        config = staged(config, schedule, 2)
    without = run_to_the_end(config, 2)
    evaluated = run_to_the_end(change(config, eval__every=4), 2)
    assert digests_of(evaluated) == digests_of(without)
    assert [item["step"] for item in evaluated[0]["evaluations"]] == [4, 8, 10]
    assert evaluated[0]["evaluations"][-1]["auc"] == without[0]["auc"]
    ended = run_to_the_end(change(config, eval__every=5, eval__patience=1, eval__min_delta=2.0, run__steps=20), 2)
    assert digests_of(ended) == digests_of(without)


def test_ranks_rest_together_where_rows_hardly_fit(clicks: MakeConfig) -> None:
    """A rank with room begins no exchange of a batch whose rows fit on the other rank after the next step only."""
    config = change(clicks(eval_fraction=0.2), store__url="", run__steps=6, oracle__lookahead=4)
    tight = change(config, cache__rows=-(-largest_batch(config) // 2) + 25, eval__every=1)
    assert digests_of(run_to_the_end(tight, 2)) == digests_of(run_to_the_end(change(config, cache__rows=0), 2))


EVALUATED = ["--data.eval_fraction", "0.2", "--eval.every", "4", "--eval.keep_best", "true"]


@pytest.mark.parametrize("point", some_of(["after-checkpoint-data:2", "after-commit:2", "after-commit:4"], {0, 2}))
def test_a_killed_job_resumes_its_evaluations(point: str, server: EmbeddedServer, tmp_path: Path) -> None:
    whole = Resumed(folder=tmp_path / "whole", arguments=["--store.url", server.url, *EVALUATED])
    whole.folder.mkdir()
    assert whole.run().code == 0
    job = Resumed(folder=tmp_path / "killed", arguments=["--store.url", server.url, *EVALUATED])
    job.folder.mkdir()
    died = job.run(dies_at=point)
    assert died.code == -signal.SIGKILL
    await_gone(died.mark)
    assert job.run().code == 0
    assert digests(job.result) == digests(whole.result)
    results = [json.loads(path.read_text()) for path in (job.result, whole.result)]
    assert results[0]["evaluations"] == results[1]["evaluations"]
    assert results[0]["best_step"] == results[1]["best_step"]


def test_the_best_checkpoint_is_kept_and_resumed_by_name(server: EmbeddedServer, tmp_path: Path) -> None:
    arguments = ["--store.url", server.url, *EVALUATED, "--eval.min_delta", "2", "--checkpoint.keep", "1"]
    job = Resumed(folder=tmp_path, arguments=arguments)
    assert job.run().code == 0
    best = read_best(job.checkpoints)
    assert best is not None
    assert (best.step, best.metric) == (4, "auc")
    short = run_forked([*JOB, *EVALUATED[:2], "--run.steps", "4", "--result", str(tmp_path / "short.json")], tmp_path)
    assert short.code == 0
    again = job.run("--checkpoint.resume", "best", "--run.steps", "4", "--eval.every", "0", "--eval.keep_best", "false")
    assert (again.code, job.resumed_from()) == (0, 4)
    assert digests(job.result) == digests(tmp_path / "short.json")
