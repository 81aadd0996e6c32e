"""Two days of examples/daily, on small data, each command in a process of its own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from data.cli import main as data
from tests.system.programs import run_forked

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]


def runner(folder: Path, done: list[str]) -> Callable[[Sequence[str]], int]:
    """Runs a command of the script, and notes its name."""

    def run(command: Sequence[str]) -> int:
        _, module, *arguments = command
        done.append(arguments[0] if not arguments[0].startswith("--") else "train")
        if module == "data":
            return data(arguments)
        ended = run_forked(arguments, folder)
        assert ended.code == 0, ended.err
        return ended.code

    return run


def test_a_day_starts_from_the_best_model_of_the_day_before(tmp_path: Path) -> None:
    day = importlib.import_module("examples.daily.day")
    days, runs = tmp_path / "days", tmp_path / "runs"
    days.mkdir()
    for number in (0, 1):
        data(["synth", "--rows", "2000", "--seed", str(number), "--out", str(days / f"day_{number}.tsv")])
    done: list[str] = []
    flags = ["--days", str(days), "--runs", str(runs), "--data.workers", "0"]
    for number in (0, 1):
        assert day.main([str(number), *flags], run=runner(tmp_path, done)) == 0
    assert done == ["convert", "train", "predict", "export"] * 2
    results = [json.loads((runs / f"day_{number}.json").read_text()) for number in (0, 1)]
    assert all(result["best_step"] for result in results)
    assert results[0]["started_from"] is None
    started = results[1]["started_from"]
    assert started["source"] == f"the checkpoint of step {results[0]['best_step']} in {runs / 'day_0'}"
    others = {item["name"]: item["fate"] for item in started["items"] if item["fate"] != "taken"}
    assert others == {"totals": "new", "data": "new", "evaluations": "new"}
    assert pq.read_table(runs / "day_1.scores.parquet").num_rows == 2000
    with safe_open(runs / "day_1.model" / "model.safetensors", framework="pt") as file:
        assert int(file.metadata()["step"]) == results[1]["best_step"]
    # The same command again has nothing left to train.
    assert day.main(["1", *flags], run=runner(tmp_path, done)) == 0
    assert done[8:] == ["train", "predict"]
    again = json.loads((runs / "day_1.json").read_text())
    assert again["dense_digest"] == results[1]["dense_digest"]
