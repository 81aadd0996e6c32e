"""`data.eval_path`: evaluation with files of their own is evaluation with the same rows held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from sklearn.metrics import roc_auc_score

from tests.data.files import criteo_lines
from tests.system.programs import run_forked

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

SMALL = [
    "--data.batch_size", "16", "--model.embedding_dim", "4", "--model.bottom_mlp", "4", "--model.top_mlp", "4",
    "--data.format", "criteo-tsv", "--data.workers", "0", "--cache.rows", "5000", "--store.url", "memory://",
]  # fmt: skip


def train(folder: Path, *flags: str) -> dict[str, Any]:
    result = folder / "result.json"
    done = run_forked([*SMALL, *flags, "--result", str(result)], folder)
    assert (done.code, done.err) == (0, "")
    value: dict[str, Any] = json.loads(result.read_text())
    return value


def test_own_files_are_worth_the_held_out_rows(tmp_path: Path) -> None:
    lines = criteo_lines(200).splitlines(keepends=True)
    files = {"whole": lines, "train": lines[:150], "day_1": lines[150:170], "day_2": lines[170:]}
    (tmp_path / "days").mkdir()
    for name, part in files.items():
        (tmp_path / ("days" if name.startswith("day") else "") / name).write_bytes(b"".join(part))
    held_out = train(tmp_path, "--data.path", str(tmp_path / "whole"), "--data.eval_fraction", "0.25")
    flags = ["--data.path", str(tmp_path / "train"), "--data.eval_path", str(tmp_path / "days")]
    own = train(tmp_path, *flags, "--data.eval_fraction", "0")
    for key in ("samples", "dense_digest", "embedding_digest", "auc", "ne"):
        assert own[key] == held_out[key]
    limited = train(tmp_path, *flags, "--data.eval_fraction", "0", "--data.limit", "20")
    assert limited["samples"] == 20
    assert limited["auc"] is not None


def test_files_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(criteo_lines(40))
    for number, (flags, line) in enumerate(
        (
            (["--data.eval_path", "good"], "--data.eval_path good needs data.eval_fraction 0, got 0.1: evaluate with"),
            (["--data.eval_path", "no", "--data.eval_fraction", "0"], "data.path no: no such file or folder"),
        )
    ):
        done = run_forked([*SMALL, "--data.path", str(tmp_path / "good"), *flags], tmp_path)
        assert done.code == 2, number
        assert done.error_line.startswith(f"error: {line}")


def grouped_lines(rows: int) -> list[bytes]:
    """Lines of Criteo whose users (C1) are five, or missing."""
    users = [b"", b"a", b"b", b"c", b"d", b"e"]
    found = [line.split(b"\t") for line in criteo_lines(rows).splitlines(keepends=True)]
    return [b"\t".join([*words[:14], users[number % 6], *words[15:]]) for number, words in enumerate(found)]


def area_by_group(users: list[bytes], labels: list[float], scores: list[float]) -> float:
    """GAUC by scikit-learn, and a loop over groups; examples without one do not count."""
    areas, sizes = [], []
    for user in set(users) - {b""}:
        own = [number for number, name in enumerate(users) if name == user]
        if len({labels[number] for number in own}) == 2:
            areas.append(roc_auc_score([labels[number] for number in own], [scores[number] for number in own]))
            sizes.append(len(own))
    return float(np.average(areas, weights=sizes))


def test_ids_that_are_rare_in_scored_examples_keep_their_rows(tmp_path: Path) -> None:
    """With a threshold of uses: the job, and eval with any size of batches, score the examples alike."""
    lines = grouped_lines(200)
    for name, part in {"train": lines[:150], "test": lines[150:]}.items():
        (tmp_path / name).write_bytes(b"".join(part))
    folder = ["--checkpoint.dir", str(tmp_path / "checkpoints")]
    data = ["--data.path", str(tmp_path / "train"), "--data.eval_fraction", "0", "--data.min_uses", "3"]
    found = train(tmp_path, *data, *folder, "--data.test_path", str(tmp_path / "test"))
    for size in ("5", "50"):
        again = tmp_path / f"{size}.json"
        test = ["--data.path", str(tmp_path / "test"), "--data.eval_fraction", "0", "--data.batch_size", size]
        done = run_forked(["eval", *SMALL, *folder, *test, "--result", str(again)], tmp_path)
        assert done.code == 0, done.err
        scored = json.loads(again.read_text())
        expected = {name: value for name, value in found["test"].items() if name not in ("tasks", "metrics_left_out")}
        assert {name: scored[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_the_best_model_is_scored_once_on_the_test_file(tmp_path: Path) -> None:
    """As the command eval scores it, and by the scores that predict writes."""
    lines = grouped_lines(200)
    for name, part in {"train": lines[:150], "valid": lines[150:170], "test": lines[170:]}.items():
        (tmp_path / name).write_bytes(b"".join(part))
    (tmp_path / "bad").write_bytes(lines[0] + b"1\t2\n")
    paths = ["--data.path", str(tmp_path / "train"), "--checkpoint.dir", str(tmp_path / "checkpoints")]
    valid = ["--data.eval_path", str(tmp_path / "valid"), "--data.eval_fraction", "0", "--eval.every", "3"]
    group = ["--eval.group", "C1"]
    kept = ["--eval.keep_best", "true", "--eval.metric", "logloss", "--optim.dense_lr", "0.5", "--checkpoint.keep", "1"]
    found = train(tmp_path, *paths, *valid, *kept, *group, "--data.test_path", str(tmp_path / "test"))
    assert found["test"]["step"] == found["best_step"]
    resume = ["--checkpoint.dir", str(tmp_path / "checkpoints"), "--checkpoint.resume", "best"]
    test = ["--data.path", str(tmp_path / "test"), "--data.eval_fraction", "0"]
    again = tmp_path / "again.json"
    done = run_forked(["eval", *SMALL, *resume, *test, *group, "--result", str(again)], tmp_path)
    assert done.code == 0, done.err
    assert json.loads(again.read_text()) == found["test"]
    scores = tmp_path / "scores.parquet"
    done = run_forked(["predict", *SMALL, *resume, *test, *group, "--out", str(scores)], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert f"GAUC {found['test']['gauc']:.5f}" in done.out
    table = pyarrow.parquet.read_table(scores).to_pydict()
    users = [line.split(b"\t")[14] for line in lines[170:]]
    assert found["test"]["gauc"] == pytest.approx(area_by_group(users, table["label"], table["logit"]), abs=1e-12)
    assert found["test"]["gauc_groups"] + found["test"]["gauc_groups_left_out"] == 5
    for command in (["eval"], ["predict", "--out", str(scores)]):
        done = run_forked([*command, *SMALL, *resume, *test, "--eval.group", "user"], tmp_path)
        assert done.code == 2
        assert done.error_line.startswith("error: eval.group must be a feature of the data, one of C1, C2, ")
    # A row that cannot be read is reported after the result is written; other columns before training.
    result = tmp_path / "result.json"
    result.unlink()
    ended = ["--data.test_path", str(tmp_path / "bad"), "--result", str(result)]
    done = run_forked([*SMALL, *paths, *valid, *kept, *ended], tmp_path)
    assert (done.code, json.loads(result.read_text())["test"]) == (2, None)
    assert done.err.splitlines()[-1].startswith(f"error: {tmp_path / 'bad'}:2: ")
    done = run_forked([*SMALL, "--data.path", str(tmp_path / "train"), "--data.test_path", "x"], tmp_path)
    assert done.code == 2
    assert done.error_line == "error: data.test_path x needs checkpoint.dir, whose checkpoint is scored, got none"
