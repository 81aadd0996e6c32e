from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.verify import verify
from bagpipe.types.batch import Batch
from data.replay.plan_counts import ExchangeCounts, PlanTotals, exchanged_now
from tests.oracle.batches import make_batch, mortal_traces, traces


@settings(max_examples=50)
@given(traces())
def test_both_ends_of_every_exchange_count_the_same(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    for _, plan in plan_batches(batches, spec):
        counts, (pulled, pushed) = ExchangeCounts.of(plan), exchanged_now(plan)
        assert (pulled.sum(), pushed.sum()) == (counts.pull_now, counts.push_now)
        if spec.world_size == 1:
            assert counts.rows == pulled.sum() == pushed.sum() == 0
            continue
        # Consumers list the rows they read from other ranks, owners the rows they serve; each row has a gradient in
        # return.
        remote = sum(int((consumer.owners != rank).sum()) for rank, consumer in enumerate(plan.consumers))
        assert counts.pull_now + counts.pull_early == counts.push_now + counts.push_late == remote
        assert counts.rows == 2 * remote


def test_a_row_of_both_ranks_crosses_once_each_way() -> None:
    spec = OracleSpec(
        table_rows=(None, None),
        features=(FeatureRef(feature=0, table=0), FeatureRef(feature=1, table=1)),
        num_slots=9,
        lookahead=3,
        world_size=2,
    )
    # Table 0: one row for both ranks, in every batch. Table 1: a row for each rank.
    batches = [make_batch(index, [[[5], [5]], [[1], [2]]]) for index in range(3)]
    plans = [plan for _, plan in plan_batches(batches, spec)]
    found = [(ExchangeCounts.of(plan), [now.tolist() for now in exchanged_now(plan)]) for plan in plans]
    assert [counts.rows for counts, _ in found] == [2, 2, 2]
    # The first batch pulls no row changed by an earlier batch; the last pushes no row needed by a later one.
    assert [now for _, now in found] == [[[0, 0], [1, 0]], [[1, 0], [1, 0]], [[1, 0], [0, 0]]]


@settings(max_examples=50)
@given(st.one_of(traces(), mortal_traces()).filter(lambda trace: trace[0].num_slots > 0))
def test_totals_are_sums_over_plans(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    weight_bytes = np.arange(1, len(spec.table_rows) + 1) * 4
    totals = PlanTotals(weight_bytes, 2 * weight_bytes)
    plans = [plan for _, plan in plan_batches(batches, spec)]
    resident: set[tuple[int, int]] = set()
    peak = misses = unique = waiting = dropped = 0
    # Rows of the previous batch; with delayed rows that one is under way, and the batch before it is meant.
    latest: list[set[tuple[int, int]]] = [set(), set()]
    for plan in plans:
        totals.add(plan)
        used = rows_in(plan.consumers)
        gone = set().union(*(rows_of(owner.expired) for owner in plan.owners if owner.expired is not None))
        dropped += len(gone & resident)
        resident -= gone
        misses += len(used - resident)
        unique += len(used)
        for owner in plan.owners:
            waiting += len(rows_of(owner.evict) & latest[-1 - spec.rows_delay])
            resident -= rows_of(owner.evict)
        latest.append(used)
        for owner in plan.owners:
            resident |= rows_of(owner.fetch)
        peak = max(peak, len(resident))
    assert (totals.misses.sum(), totals.rows_unique, totals.peak_rows) == (misses, unique, peak)
    assert totals.dropped.sum() == dropped
    assert totals.evictions_waiting == waiting == verify(zip(batches, plans, strict=True), spec).evictions_waiting
    assert (totals.batches_waiting > 0) is (waiting > 0)
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
