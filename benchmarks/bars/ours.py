"""One run of bagpipe's trainer: training with early stop, then the test examples scored from the best checkpoint."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagpipe.config.load import parse_config
from benchmarks.bars.settings import ALL_ROWS_DECAY, BATCH_SIZE, CLIP_NORM, OPTIMIZERS, PATIENCE, Outcome, Run
from trainer.job import run_job
from trainer.scoring import evaluate

__all__ = ["flags_of", "measure_ours"]

#: FuxiCTR's rule: a tenth of the rate after each evaluation that is not better, and at least 1e-6.
_PLATEAU = {
    "schedule": "plateau",
    "schedule_patience": 0,
    "schedule_threshold": 1e-6,
    "schedule_factor": 0.1,
    "schedule_floor": 1e-3,
}


def flags_of(run: Run, data: Path) -> list[str]:
    """Flags of the trainer for a run.

    Args:
        run: what to train.
        data: folder of `prepare`.
    """
    optimizer = OPTIMIZERS[run.optimizer]
    files = data / "ours"
    sections: Mapping[str, Mapping[str, Any]] = {
        "data": {
            "path": files / "train.parquet",
            "eval_path": files / "valid.parquet",
            "eval_fraction": 0,
            "schema": files / "schema.toml",
            "format": "parquet",
            "batch_size": BATCH_SIZE,
            "epochs": run.epochs,
            "shuffle": True,
        },
        "model": run.our_model,
        "optim": {
            "rows": optimizer.ours,
            "rows_lr": optimizer.rate,
            "dense": optimizer.ours,
            "dense_lr": optimizer.rate,
            "eps": optimizer.eps,
            "clip_norm": CLIP_NORM,
            "clip_scope": "all",
            **_PLATEAU,
            **({"rows_weight_decay": ALL_ROWS_DECAY, "rows_decay_kind": "l2"} if run.system == "all-rows" else {}),
        },
        "eval": {
            "every": 1,
            "unit": "epoch",
            "metric": "auc",
            "patience": PATIENCE,
            "min_delta": 1e-6,  # FuxiCTR's
        },
        "cache": {"rows": 8_000},  # of 9,610: the others are in the store
        "run": {
            "seed": run.seed,
            "threads": 1,
            "dtype": "float64" if run.same_start else "float32",
            "log_every_s": 600,
        },
    }
    return [
        word
        for section, keys in sections.items()
        for key, value in keys.items()
        for word in (f"--{section}.{key}", _text(value))
    ]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def measure_ours(run: Run, data: Path, parameters: int) -> Outcome:
    """Train and score.

    Args:
        run, data: see `flags_of`.
        parameters: numbers that are trained, for the outcome.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags_of(run, data), "--checkpoint.dir", f"{folder}/checkpoints", "--checkpoint.every", "0"]
        flags += ["--eval.keep_best", "true"]
        start_s = time.perf_counter()
        trained = _train(flags, Path(folder) / "train.json")
        seconds = time.perf_counter() - start_s
        best = ["--data.eval_path", str(data / "ours" / "test.parquet"), "--checkpoint.resume", "best"]
        scored = _evaluate([*flags, *best], Path(folder) / "test.json")
    return Outcome(
        auc=scored["auc"],
        logloss=scored["logloss"],
        history=[evaluation["auc"] for evaluation in trained["evaluations"]],
        parameters=parameters,
        seconds=round(seconds, 1),
    )


def _train(flags: list[str], result: Path) -> dict[str, Any]:
    """Result of ``python -m trainer``, run in this process: importing its packages takes as long as an epoch."""
    trained = run_job(parse_config(flags, "python -m trainer").config, result_path=str(result))
    if trained.stopped:
        raise KeyboardInterrupt
    return _read(result)


def _evaluate(flags: list[str], result: Path) -> dict[str, Any]:
    """Result of ``python -m trainer eval``."""
    evaluate([*flags, "--result", str(result)])
    return _read(result)


def _read(result: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return value
