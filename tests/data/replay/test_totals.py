from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.types.batch import Batch
from data.replay.exchange import ExchangeCounts
from data.replay.totals import PlanTotals
from tests.oracle.batches import traces


@settings(max_examples=50)
@given(traces().filter(lambda trace: trace[0].num_slots > 0))
def test_totals_are_sums_over_plans(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    weight_bytes = np.arange(1, len(spec.table_rows) + 1) * 4
    totals = PlanTotals(weight_bytes, 2 * weight_bytes)
    plans = [plan for _, plan in plan_batches(batches, spec)]
    resident: set[tuple[int, int]] = set()
    peak = misses = unique = 0
    for plan in plans:
        totals.add(plan)
        used = rows_in(plan.consumers)
        misses += len(used - resident)
        unique += len(used)
        for owner in plan.owners:
            resident -= rows_of(owner.evict)
        for owner in plan.owners:
            resident |= rows_of(owner.fetch)
        peak = max(peak, len(resident))
    assert (totals.misses.sum(), totals.rows_unique, totals.peak_rows) == (misses, unique, peak)
    counts = [ExchangeCounts.of(plan) for plan in plans]
    assert totals.exchange_rows == sum(count.rows for count in counts)
    assert totals.exchange_rows_now == sum(int(count.pull_now + count.push_now) for count in counts)
    pulled, pushed = (sum(int(getattr(count, name)) for count in counts) for name in ("pull_now", "push_now"))
    assert 4 * (pulled + 2 * pushed) <= totals.exchange_bytes_now <= weight_bytes[-1] * (pulled + 2 * pushed)


def rows_in(consumers: object) -> set[tuple[int, int]]:
    return set().union(*(rows_of(consumer.unique) for consumer in consumers))  # type: ignore[attr-defined]


def rows_of(rows: object) -> set[tuple[int, int]]:
    tables = np.repeat(np.arange(len(rows.table_offsets) - 1), np.diff(rows.table_offsets))  # type: ignore[attr-defined]
    return set(zip(tables.tolist(), rows.ids.tolist(), strict=True))  # type: ignore[attr-defined]
