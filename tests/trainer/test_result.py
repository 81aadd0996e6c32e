from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from trainer.result import Result

RESULT = Result(
    steps=3, samples=30, seconds=1.5, samples_per_s=20.0, loss=None, auc=0.5, ne=None, metrics_left_out={"ne": "why"},
    tasks={}, logloss=0.6, calibration=1.25, gauc=None, gauc_groups=None, gauc_groups_left_out=None,
    rows_unique=10, rows_new=3, rows_fetched=1, rows_written=4, evictions_waiting=2, cache_rows=5, hit_rate=0.5,
    exposed_embedding_s=0.1, step_s_p50=None, planned_step_s=None, dense_digest="d", embedding_digest="e",
    peak_rss_bytes=1, skipped_rows=2, skipped_batches=3, loss_scale=2048,
    resumed_from=20, checkpoints=4, checkpoint_stall_s=0.25, stopped=False, continued=True,
    started_from=None, test=None, verified=None,
    evaluations=[{"step": 3, "auc": 0.5}], best_step=3, early_stopped=True,
)  # fmt: skip


def test_the_result_is_one_json_object(tmp_path: Path) -> None:
    RESULT.write(str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == dataclasses.asdict(RESULT)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_summary_of_a_result() -> None:
    text = "\n".join(RESULT.lines())
    assert "interrupted" not in text
    assert "the run was interrupted" in "\n".join(dataclasses.replace(RESULT, stopped=True).lines())
    assert "AUC 0.50000" in text
    assert "AUC 0.50000   NE n/a   log loss 0.60000   calibration 1.25000   step p50" in text
    assert "1 evaluations, the best one at step 3" in text
    assert "training ended early" in text
    assert "NE is left out: why" in text
    assert "rows: 10 used, 50.0% from the cache, 20.0% from the store, 30.0% new   1 fetched, 4 written" in text
    assert "GAUC" not in text
    assert "2 malformed rows were skipped" in text
    assert "training started from another job's rows" in text
    assert "3 batches were skipped: a loss or gradient was not finite (loss scale at the end: 2048)" in text
    assert "resumed from the checkpoint at step 20" in text
    assert "4 checkpoints written, training waited 0.25 s" in text


def test_a_plan_is_compared_with_the_step() -> None:
    planned = dataclasses.replace(RESULT, planned_step_s=0.01)
    assert "the plan predicted 10.00 ms for the dense part of a step" in planned.lines()
    measured = dataclasses.replace(planned, step_s_p50=0.0125)
    last = "the plan predicted 10.00 ms for the dense part of a step, the whole step took 1.25 times that"
    assert last in measured.lines()
    assert not [line for line in RESULT.lines() if "plan" in line]


def test_the_summary_of_several_labels() -> None:
    values = {"auc": 0.5, "ne": None, "logloss": 0.25, "calibration": None, "gauc": None}
    tasks = {"click": {**values, "metrics_left_out": {}}, "buy": {**values, "metrics_left_out": {"ne": "why"}}}
    lines = dataclasses.replace(RESULT, tasks=tasks).lines()
    assert lines[1] == "loss n/a   step p50 n/a"
    shown = "AUC 0.50000   NE n/a   log loss 0.25000   calibration n/a"
    assert [f"click: {shown}", f"buy: {shown}", "buy: NE is left out: why"] == lines[5:8]
