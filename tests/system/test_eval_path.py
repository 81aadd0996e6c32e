"""`data.eval_path`: evaluation with files of their own is evaluation with the same rows held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def test_the_best_model_is_scored_once_on_the_test_file(tmp_path: Path) -> None:
    """As the command eval scores it."""
    lines = criteo_lines(200).splitlines(keepends=True)
    for name, part in {"train": lines[:150], "valid": lines[150:170], "test": lines[170:]}.items():
        (tmp_path / name).write_bytes(b"".join(part))
    (tmp_path / "bad").write_bytes(lines[0] + b"1\t2\n")
    paths = ["--data.path", str(tmp_path / "train"), "--checkpoint.dir", str(tmp_path / "checkpoints")]
    valid = ["--data.eval_path", str(tmp_path / "valid"), "--data.eval_fraction", "0", "--eval.every", "3"]
    kept = ["--eval.keep_best", "true", "--eval.metric", "logloss", "--optim.dense_lr", "0.5", "--checkpoint.keep", "1"]
    found = train(tmp_path, *paths, *valid, *kept, "--data.test_path", str(tmp_path / "test"))
    assert found["test"]["step"] == found["best_step"]
    resume = ["--checkpoint.dir", str(tmp_path / "checkpoints"), "--checkpoint.resume", "best"]
    test = ["--data.path", str(tmp_path / "test"), "--data.eval_fraction", "0"]
    again = tmp_path / "again.json"
    done = run_forked(["eval", *SMALL, *resume, *test, "--result", str(again)], tmp_path)
    assert done.code == 0, done.err
    assert json.loads(again.read_text()) == found["test"]
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
