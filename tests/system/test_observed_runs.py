"""Reports of running jobs: lines, JSON, files; by whole programs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.system.programs import await_gone, run_forked, torchrun

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

SMALL = [
    "--data.limit", "1500", "--data.batch_size", "64", "--model.embedding_dim", "4", "--model.bottom_mlp", "6",
    "--model.top_mlp", "5", "--data.workers", "0", "--run.log_every_s", "0.001",
]  # fmt: skip

PHASES = [
    "starting the cacher", "starting the store", "store started", "connecting to the cacher", "building the model",
    "connecting to the store", "training", "evaluating", "computing digests",
]  # fmt: skip


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def check_events(events: list[dict[str, Any]], result: dict[str, Any]) -> None:
    assert [event["phase"] for event in events if event["event"] == "phase"] == PHASES
    intervals = [event for event in events if event["event"] == "interval"]
    assert [event["step"] for event in intervals] == sorted({event["step"] for event in intervals})
    last = intervals[-1]
    assert (last["step"], last["samples"]) == (result["steps"], result["samples"])
    assert last["loss"] == pytest.approx(result["loss"])
    assert last["eta_s"] == 0
    assert last["exposed_s"] == pytest.approx(result["exposed_embedding_s"])
    assert last["exposed_s"] > 0
    assert set(last["lanes"]) >= {"data", "net-in", "copy", "compute", "net-out"}
    (evaluation,) = (event for event in events if event["event"] == "evaluation")
    assert (evaluation["step"], evaluation["auc"]) == (result["steps"], result["auc"])
    assert events[-1]["event"] == "end"
    assert {name: events[-1][name] for name in result} == result


def test_a_job_without_a_terminal_says_what_it_does(tmp_path: Path) -> None:
    log, result = tmp_path / "log.jsonl", tmp_path / "result.json"
    done = run_forked([*SMALL, "--run.log", str(log), "--result", str(result)], tmp_path)
    assert (done.code, done.err) == (0, ""), done.err
    lines = [line.partition("] ")[2] for line in done.out.splitlines() if line.startswith("[")]
    assert [line.partition(": ")[0] for line in lines if line.partition(": ")[0] in PHASES] == PHASES
    assert re.search(r"store started: (redis|valkey) \d+\.\d+.*, /.*-server", done.out)
    assert lines[PHASES.index("training") + 1].startswith("step ")
    assert "embedding digest" in done.out
    check_events(events_of(log.read_text()), json.loads(result.read_text()))


def test_stdout_is_json_if_asked(tmp_path: Path) -> None:
    result, folder = tmp_path / "result.json", tmp_path / "checkpoints"
    # One interval: the one at the end, when the lanes have stopped.
    arguments = ["--run.log_format", "json", "--run.log_every_s", "1000"]
    arguments += ["--checkpoint.dir", str(folder), "--checkpoint.every", "5"]
    arguments += [
        "--optim.clip_norm",
        "0.01",
        "--optim.clip_scope",
        "all",
        "--optim.rows_lr_by_table",
        "C1=0.5,C2=0.02",
    ]
    done = run_forked([*SMALL, *arguments, "--result", str(result)], tmp_path)
    assert (done.code, done.err) == (0, ""), done.err
    events = events_of(done.out)
    check_events(events, json.loads(result.read_text()))
    (interval,) = (event for event in events if event["event"] == "interval")
    assert interval["grad_norm"] > 0
    assert (interval["rows_lr"], interval["rows_lr_by_table"]) == (0.02, {"C1": 0.5})
    steps = [event["checkpoint_step"] for event in events if event["event"] == "checkpoint"]
    assert steps == sorted(set(steps))
    assert steps[-1] == json.loads(result.read_text())["steps"]


@pytest.mark.slow
def test_one_rank_of_two_reports(tmp_path: Path) -> None:
    log, result = tmp_path / "log.jsonl", tmp_path / "result.json"
    limit = ["--optim.clip_norm", "0.01", "--optim.clip_scope", "rows"]
    with torchrun([*SMALL, *limit, "--run.log", str(log), "--result", str(result)], forked=tmp_path) as program:
        done = program.finish()
    await_gone(done.mark)
    assert done.code == 0, done.err
    events = events_of(log.read_text())
    assert [event["event"] for event in events].count("end") == 1
    assert [event["phase"] for event in events if event["event"] == "phase"] == PHASES
    assert min(event["grad_norm"] for event in events if event["event"] == "interval" and event["loss"]) > 0


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="the package is there")
def test_a_missing_tracker_is_refused_before_training(tmp_path: Path) -> None:
    done = run_forked([*SMALL, "--run.trackers", "wandb"], tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: run.trackers: wandb needs the package wandb: pip install wandb")
    assert len(done.err.splitlines()) == 1


def test_a_job_that_fails_says_so_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = run_forked([*SMALL, "--run.log", str(log), "--cache.rows", "3"], tmp_path)
    assert done.code == 2
    last = events_of(log.read_text())[-1]
    assert (last["event"], last["type"]) == ("error", "CapacityError")
    assert last["error"] in done.err


def test_areas_by_the_ids_of_a_feature(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    more = ["--eval.group", "C1", "--eval.metric", "gauc", "--eval.every", "10", "--result", str(result)]
    done = run_forked([*SMALL, *more], tmp_path)
    assert (done.code, done.err) == (0, ""), done.err
    value = json.loads(result.read_text())
    assert 0 < value["gauc"] < 1
    assert value["gauc_groups"] > 0
    assert value["gauc"] == value["evaluations"][-1]["gauc"]
    assert f"GAUC {value['gauc']:.5f}" in done.out


def test_a_group_that_is_no_feature_is_refused(tmp_path: Path) -> None:
    done = run_forked([*SMALL, "--eval.group", "user"], tmp_path)
    assert done.code == 2
    assert "error: eval.group must be a feature of the data, one of " in done.err


def test_evaluations_during_training_are_events(tmp_path: Path) -> None:
    done = run_forked([*SMALL, "--run.log_format", "json", "--eval.every", "10"], tmp_path)
    assert (done.code, done.err) == (0, ""), done.err
    events = events_of(done.out)
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [10, 20, 22]
    assert [event["auc"] for event in evaluations] == [each["auc"] for each in events[-1]["evaluations"]]


def test_a_job_that_is_started_again_says_from_where_and_when_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    job = [*SMALL, "--store.url", "memory://", "--checkpoint.dir", str(folder), "--data.limit", "640"]
    some = ["--run.steps", "3"]
    beginnings, notes = [], []
    for flags in (some, some, [], []):
        done = run_forked([*job, *flags], tmp_path)
        assert done.code == 0, done.err
        beginnings.append(re.findall(r"\] resumed from (.*)", done.out))
        notes.append([line for line in done.err.splitlines() if "loaded from the checkpoint" not in line])
    newest = sorted(folder.glob("generation-*/step-*"))
    last = int(newest[-1].name.removeprefix("step-"))
    resumed = [[], *([f"the checkpoint of step {step}, epoch 0: {newest[-1]}"] for step in (3, 3, last))]
    assert [[line.partition(":")[0] for line in lines] for lines in beginnings] == [
        [line.partition(":")[0] for line in lines] for lines in resumed
    ]
    assert beginnings[-1] == resumed[-1]
    nothing = "note: nothing is left to train: the job resumes at step"
    assert notes == [
        [],
        [f"{nothing} 3, and run.steps is 3"],
        [],
        [f"{nothing} {last}, and the data has no further batch (data.epochs 1)"],
    ]
