"""`measure_planner`: ids a second that one core plans, on batches of 26 tables with the skew of click logs."""

from __future__ import annotations

import time

import numpy as np

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import Batch

__all__ = ["measure_planner"]

_TABLES = 26
_TABLE_ROWS = 200_000
_EXAMPLES = 4096
_LOOKAHEAD = 8
_PLANS = 24
#: Exponent of the law of popularity: about 1 % of the rows get 80 % of the accesses.
_EXPONENT = 1.05


def measure_planner() -> float:
    """Ids per second of processor time, reading of the data left out. Takes about a second."""
    spec = OracleSpec(
        table_rows=(_TABLE_ROWS,) * _TABLES,
        features=tuple(FeatureRef(feature=table, table=table) for table in range(_TABLES)),
        num_slots=400_000,
        lookahead=_LOOKAHEAD,
    )
    planner, generator, times = make_planner(spec), np.random.default_rng(0), []
    for index in range(_LOOKAHEAD + _PLANS):
        batch = _batch(generator, index)
        start_s = time.thread_time()
        planner.push(batch)
        if planner.is_ready:
            planner.plan()
            times.append(time.thread_time() - start_s)
    return _EXAMPLES * _TABLES / sorted(times)[len(times) // 2]


def _batch(generator: np.random.Generator, index: int) -> Batch:
    power = 1.0 - _EXPONENT
    drawn = ((float(_TABLE_ROWS) ** power - 1.0) * generator.random(_TABLES * _EXAMPLES) + 1.0) ** (1.0 / power)
    return Batch(
        index=index,
        dense=np.zeros((_EXAMPLES, 0), np.float32),
        values=np.minimum(drawn.astype(np.int64) - 1, _TABLE_ROWS - 1),
        lengths=np.ones((_TABLES, _EXAMPLES), np.int32),
        labels=np.zeros(_EXAMPLES, np.float32),
    )
