"""Rates that follow evaluations, also by epochs, equal drops at fixed steps, also when killed and resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.system.jobs import change
from tests.system.programs import run_forked
from tests.system.resumed import Resumed, digests
from tests.system.staging import staged
from tests.system.test_evaluation import MakeConfig, _digests, _result
from tests.system.test_ranks import digests_of, run_to_the_end

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

#: A metric must double to be better, so rates drop often. Factors of one half are exact.
PLATEAU: dict[str, object] = {
    "optim__schedule": "plateau",
    "optim__schedule_factor": 0.5,
    "optim__schedule_patience": 1,
    "optim__schedule_threshold": 0.9,
    "optim__schedule_cooldown": 1,
}


def drops(evaluations: Sequence[dict[str, Any]], metric: str = "auc") -> tuple[int, ...]:
    """Steps at which torch's rule halves the rate."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rule = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=1, threshold=0.9, cooldown=1)
    found = []
    for evaluation in evaluations:
        before = rule.get_last_lr()
        rule.step(evaluation[metric])
        if rule.get_last_lr() != before:
            found.append(evaluation["step"])
    return tuple(found)


def dropped_at(config: Config, steps: tuple[int, ...], keys: dict[str, object]) -> Config:
    assert steps
    fixed = {"optim__schedule": "step", "optim__schedule_factor": 0.5, "optim__schedule_milestones": steps}
    return change(config, **{**keys, **fixed, "eval__every": 0, "eval__unit": "step"})


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"eval__every": 3}, id="steps"),
        pytest.param({"eval__every": 1, "eval__unit": "epoch", "cache__rows": 0}, id="epochs, direct"),
        pytest.param({"eval__every": 3, "optim__rows_schedule": "constant"}, id="dense alone"),
    ],
)
def test_a_plateau_drops_rates_as_torch_does(
    keys: dict[str, object], clicks: MakeConfig, redis_servers: tuple[str, ...]
) -> None:
    config = change(clicks(eval_fraction=0.2, limit=150, epochs=5), store__url=redis_servers[0], cache__rows=300)
    followed = _result(config, **keys, **PLATEAU)
    steps = [evaluation["step"] for evaluation in followed["evaluations"]]
    every = 3 if keys["eval__every"] == 3 else followed["steps"] // 5
    assert steps == sorted({*range(every, followed["steps"], every), followed["steps"]})
    fixed = dropped_at(config, drops(followed["evaluations"][:-1]), keys)
    assert _digests(followed) == _digests(_result(fixed))


@pytest.mark.parametrize("schedule", [pytest.param("none", marks=pytest.mark.slow), "1f1b"])
def test_ranks_follow_one_plateau(schedule: str, clicks: MakeConfig) -> None:
    keys: dict[str, object] = {"eval__every": 1, "eval__unit": "epoch"}
    config = change(clicks(eval_fraction=0.2, limit=60, epochs=6), cache__rows=200, store__url="")
    if schedule != "none":
        config = staged(config, schedule, 2)
    followed = run_to_the_end(change(config, **keys, **PLATEAU), 2)
    assert [item["step"] for item in followed[0]["evaluations"]] == [*range(4, 25, 4)]
    fixed = dropped_at(config, drops(followed[0]["evaluations"][:-1]), keys)
    assert digests_of(followed) == digests_of(run_to_the_end(fixed, 2))


FLAGS = [
    *("--data.limit", "600", "--data.eval_fraction", "0.2", "--data.epochs", "6"),  # 4 batches an epoch
    *("--optim.schedule", "plateau", "--optim.schedule_threshold", "0.9", "--optim.schedule_patience", "1"),
    *("--eval.every", "1", "--eval.unit", "epoch"),
]


def test_a_killed_job_resumes_its_plateau(server: EmbeddedServer, tmp_path: Path) -> None:
    """Killed in the middle of an epoch, then ended between two, whose evaluation is in no checkpoint yet."""
    whole = Resumed(folder=tmp_path / "whole", arguments=["--store.url", server.url, *FLAGS])
    whole.folder.mkdir()
    assert whole.run().code == 0
    job = Resumed(folder=tmp_path / "killed", arguments=["--store.url", server.url, *FLAGS])
    job.folder.mkdir()
    assert job.run(dies_at="after-commit:2").code == -signal.SIGKILL
    assert job.run("--data.epochs", "4").code == 0
    refused = job.run("--eval.every", "2")
    assert refused.code == 2
    assert "made with evaluations of a plateau schedule 'auc of all batches every 1 epoch', this job has" in refused.err
    assert job.run().code == 0
    assert digests(job.result) == digests(whole.result)
    results = [json.loads(path.read_text()) for path in (job.result, whole.result)]
    assert results[0]["evaluations"] == results[1]["evaluations"]
    # Ended by two ranks: their order of sums is another one, the rates are not.
    ranks = Resumed(folder=tmp_path / "ranks", arguments=["--store.url", server.url, *FLAGS])
    ranks.folder.mkdir()
    run_to_the_end(parse_config(ranks.settings("--data.epochs", "4"), "test").config, 2)
    assert ranks.run().code == 0
    assert json.loads(ranks.result.read_text())["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)


def test_a_plateau_begins_and_ends_by_name(server: EmbeddedServer, tmp_path: Path) -> None:
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, "--data.eval_fraction", "0.2"])
    assert job.run("--run.steps", "6").code == 0
    plateau = ["--optim.schedule", "plateau", "--eval.every", "4"]
    began = job.run("--run.steps", "12", *plateau, "--checkpoint.change", "optim.schedule")
    assert (began.code, "optim.schedule changes from 'constant' to 'plateau'" in began.err) == (0, True)
    assert job.run("--run.steps", "14", "--checkpoint.change", "optim.schedule").code == 0
    refused = run_forked([*job.line(), "--optim.schedule", "plateau"], tmp_path)
    assert refused.code == 2
    assert "optim.schedule plateau needs eval.every, the steps or epochs between evaluations" in refused.err
