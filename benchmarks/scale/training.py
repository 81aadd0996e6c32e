"""Cost of a training step at one point: a whole job with store and cacher, on synthetic data.

    Point ──schema.toml, flags──> python -m trainer --result ──> step time, exposed time, memory

Times are wall times, because a step waits for other processes. Two processors suffice for the job.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bagpipe.errors import JobError
from benchmarks.scale.planning import EXPONENT
from benchmarks.scale.points import Point

__all__ = ["StepCost", "measure_training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost of one run.

    Attributes:
        step_ms: median step.
        exposed_ms: wait of the computation for rows per step, the first steps included.
        unique_rows: per step.
        hit_rate: share of them found in the cache.
        peak_rss_mb: of the trainer's process.
    """

    step_ms: float
    exposed_ms: float
    unique_rows: float
    hit_rate: float
    peak_rss_mb: float


def measure_training(point: Point, steps: int, folder: Path) -> StepCost:
    """Run the trainer once. JobError, with its last line: it failed."""
    names = [f"C{number}" for number in range(1, point.tables + 1)]
    lines = ['label = "click"', 'dense = ["I1"]', f"sparse = {json.dumps(names)}"]
    lines += ["[synthetic]", f"rows = {point.batch_size * (steps + point.lookahead)}"]
    rows = point.vocabulary // point.tables
    for name in names:
        lines += [f"[synthetic.features.{name}]", f"vocabulary = {rows}", f"exponent = {EXPONENT}"]
        lines += ["shift = 0.0", "head = 0.0", "missing = 0.0"]
    (folder / "schema.toml").write_text("\n".join(lines) + "\n")
    flags = {
        "data.format": "synthetic",
        "data.schema": folder / "schema.toml",
        "data.batch_size": point.batch_size,
        "data.eval_fraction": 0.0,
        "oracle.lookahead": point.lookahead,
        "cache.rows": point.cache_rows,
        "model.name": "wide-deep",  # DLRM's interaction grows with the square of the tables
        "model.embedding_dim": 16,
        "run.steps": steps,
        "result": folder / "result.json",
    }
    command = [sys.executable, "-m", "trainer", *(f"--{key}={value}" for key, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"the trainer failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    result = json.loads((folder / "result.json").read_text())
    return StepCost(
        step_ms=result["step_s_p50"] * 1e3,
        exposed_ms=result["exposed_embedding_s"] / steps * 1e3,
        unique_rows=result["rows_unique"] / steps,
        hit_rate=result["hit_rate"],
        peak_rss_mb=result["peak_rss_bytes"] / 1e6,
    )
