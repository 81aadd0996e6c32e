"""Evaluations during training: they change no bit of it, and say when it ends."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagpipe.checkpoint.best import read_best
from bagpipe.checkpoint.checkpoint_store import CheckpointStore
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.sections import Config
from bagpipe.errors import EXIT_INTERRUPTED
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.training.digest import embedding_digest
from bagpipe.types.schema import RowSchema
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


#: Rules by which a row of a later batch, which the cache has ahead, reads other values than its own.
UNCREATED: dict[str, dict[str, object]] = {
    "default row": {"data__min_uses": 3},
    "no row": {"data__min_uses": 3, "data__default_row": "zero"},
    "expired": {"data__expire_after": 6.0, "data__expire_unit": "steps", "data__expire_every": 3},
}
UNCREATED["all"] = {**UNCREATED["default row"], **UNCREATED["expired"]}
#: A rate that halves unless an evaluation is better than those before.
UNCREATED["plateau"] = {
    **UNCREATED["no row"],
    "optim__schedule": "plateau",
    "optim__schedule_factor": 0.5,
    "optim__schedule_patience": 1,
}


@pytest.mark.parametrize("rules", some_of(list(UNCREATED), {3, 4}))
def test_rows_that_no_batch_has_created_are_no_rows(
    rules: str, clicks: MakeConfig, redis_servers: tuple[str, ...], tmp_path: Path
) -> None:
    """Evaluations, checkpoints and rates are those without a cache, however far ahead rows are, also after a resume."""
    config = change(clicks(eval_fraction=0.2), store__url=redis_servers[0], run__steps=10, eval__every=1)
    config = change(config, checkpoint__every=4, checkpoint__keep=9, **UNCREATED[rules])
    direct = _result(config, checkpoint__dir=str(tmp_path / "direct"))
    assert direct["evaluations"][6]["ne"] == _result(config, run__steps=7)["ne"]
    ahead = {"cache__rows": 300, "cache__prefetch_depth": 5, "oracle__lookahead": 20}
    config = change(config, **ahead, checkpoint__dir=str(tmp_path / "cached"), store__namespace=uuid.uuid4().hex)
    run_job(change(config, run__steps=5))
    cached = dataclasses.asdict(run_job(config))
    assert _digests(cached) == _digests(direct)
    assert cached["evaluations"] == direct["evaluations"]
    rows = [_rows_of(tmp_path / name) for name in ("direct", "cached")]
    assert {0, 4, 8, 10} == rows[0].keys() == rows[1].keys() - {5}
    assert rows[0].items() <= rows[1].items()


def _rows_of(folder: Path) -> dict[int, str]:
    """Digest of the rows of each checkpoint, by its step."""
    found = {}
    folders = CheckpointFolder(folder)
    for generation, step in folders.positions():
        checkpoint = folders.known(generation, step)
        schema = RowSchema.from_json(checkpoint.manifest.row_schema)
        store = CheckpointStore(checkpoint.folder, checkpoint.manifest, schema)
        found[step] = embedding_digest(store)
    return found


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_that_is_due_at_once_sees_the_rows_of_the_checkpoint(
    world_size: int, clicks: MakeConfig, tmp_path: Path
) -> None:
    """The job ended between a checkpoint and its evaluation; the store is a new one. Batches follow, or none."""
    config = change(clicks(eval_fraction=0.2), cache__rows=200, store__url="", **UNCREATED["all"])

    def result(**values: object) -> dict[str, Any]:
        changed = change(config, **values)
        return _result(changed) if world_size == 1 else run_to_the_end(changed, world_size)[0]

    whole = result(eval__every=4, run__steps=8)
    result(run__steps=4, checkpoint__dir=str(tmp_path / "first"))
    for steps in (4, 8):
        shutil.copytree(tmp_path / "first", folder := tmp_path / str(steps))
        resumed = result(eval__every=4, run__steps=steps, checkpoint__dir=str(folder))
        assert resumed["resumed_from"] == 4
        assert resumed["evaluations"] == whole["evaluations"][: steps // 4]
    assert _digests(resumed) == _digests(whole)


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


#: Evaluations decide what is trained, and when it ends.
FOLLOWED = [
    *EVALUATED, "--eval.patience", "3", "--eval.min_delta", "0.5", "--optim.schedule", "plateau",
    "--optim.schedule_patience", "0", "--optim.schedule_threshold", "0.5", "--optim.schedule_factor", "0.5",
]  # fmt: skip
#: The second kind has begun the forwards of the batch after an evaluation, and cannot end there.
STOPPED = {
    "whole": [],
    "begun ahead": ["--pipeline.schedule=pipedream", "--pipeline.stages=2", "--pipeline.rows_delay=1"],
}


@pytest.mark.parametrize("dense", STOPPED)
def test_no_evaluation_is_left_out_where_a_job_is_stopped(dense: str, server: EmbeddedServer, tmp_path: Path) -> None:
    """A stop during an evaluation. Batches read ahead are not trained without it; the next start makes it."""
    arguments = ["--store.url", server.url, *FOLLOWED, "--cache.rows", "900", *STOPPED[dense]]
    whole = Resumed(folder=tmp_path / "whole", arguments=arguments)
    whole.folder.mkdir()
    assert whole.run().code == 0
    job = Resumed(folder=tmp_path / "stopped", arguments=arguments)
    job.folder.mkdir()
    assert job.run(dies_at="after-fetch:9:SIGINT").code == EXIT_INTERRUPTED
    stopped = json.loads(job.result.read_text())
    assert {item["step"] for item in stopped["evaluations"]} >= set(range(4, stopped["steps"], 4))
    assert job.run().code == 0
    assert digests(job.result) == digests(whole.result)
    results = [json.loads(path.read_text()) for path in (job.result, whole.result)]
    for name in ("steps", "evaluations", "best_step", "early_stopped"):
        assert results[0][name] == results[1][name], name
    assert results[0]["early_stopped"]


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
