"""Jobs and rows for tests of forecasts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from bagpipe.forecast.job import DenseCosts, JobShape
from bagpipe.forecast.traffic import RowTraffic, unique_curve

__all__ = ["DENSE", "TRAFFIC", "job", "replay"]

TRAFFIC = RowTraffic(
    policy="belady-window",
    lookahead=32,
    cache_rows=20_000,
    batch_examples=1024,
    ranks=1,
    ids=26_624.0,
    unique=8_000.0,
    new=1_000.0,
    fetched=500.0,
    written=1_500.0,
    waiting=0.0,
    row_bytes=136.0,
)
DENSE = DenseCosts(fixed_s=1e-3, per_example_s=1e-5, step_s=1e-4, param_bytes=4e6, activation_bytes=1e3)


def job(**changes: Any) -> JobShape:
    """A job whose dense part takes about 11 ms a batch."""
    traffic = changes.pop("traffic", TRAFFIC)
    values: dict[str, Any] = {
        "ranks": 1,
        "batch_examples": traffic.batch_examples,
        "traffic": traffic,
        "uniques": unique_curve([traffic, replace(traffic, batch_examples=4096, unique=22_000.0, ids=106_496.0)]),
        "dim": 16,
        "dense": DENSE,
    }
    return JobShape(**{**values, **changes})


def replay(**changes: Any) -> str:
    """The JSON of a replay of one setting."""
    record: dict[str, Any] = {
        "policy": "belady-window",
        "lookahead": 32,
        "cache_rows": 20_000,
        "batch_size": 1024,
        "world_size": 1,
        "error": None,
        "batches": 10,
        "ids": 266_240,
        "rows_unique": 80_000,
        "rows_first_touch": 10_000,
        "rows_fetched": 5_000,
        "rows_written": 15_000,
        "evictions_waiting": 0,
        "row_bytes": 136,
    }
    return json.dumps([{**record, **changes}])
