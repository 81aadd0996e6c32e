from __future__ import annotations

import dataclasses

import numpy as np

from bagpipe.oracle.plan import CachePlan, FeatureRef, OracleSpec, RowList
from bagpipe.oracle.plan_validation import rows_of, violations
from bagpipe.oracle.planner import plan_batches
from tests.oracle.batches import make_batch

SPEC = OracleSpec(
    table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=9, lookahead=1, world_size=2
)


def plan_of(spec: OracleSpec = SPEC) -> CachePlan:
    ((_, plan),) = plan_batches([make_batch(0, [[[1], [2]]])], spec)
    return plan


def test_a_plan_of_the_planner_fits() -> None:
    assert list(violations(plan_of(), SPEC)) == []
    alone = dataclasses.replace(SPEC, world_size=1)
    assert list(violations(plan_of(alone), alone)) == []


def test_records_are_counted() -> None:
    plan = dataclasses.replace(plan_of(), exchanges=())
    assert list(violations(plan, SPEC)) == ["expected a record of each kind for each of 2 ranks, got (2, 2, 0, 2)"]


def test_dtypes_dimensions_and_lengths_are_named() -> None:
    plan = plan_of()
    wide = dataclasses.replace(plan.consumers[1], slots=plan.consumers[1].slots.astype(np.int64))
    longer = dataclasses.replace(plan.owners[0], fetch_slots=np.arange(2, dtype=np.int32))
    broken = dataclasses.replace(plan, consumers=(plan.consumers[0], wide), owners=(longer, plan.owners[1]))
    assert list(violations(broken, SPEC)) == [
        "slots in ConsumerPlan of rank 1: expected one dimension of int32, got 1 of int64",
        "fetch_slots in OwnerPlan of rank 0: 2 of them for 1 rows",
    ]


def test_rows_one_by_one() -> None:
    assert rows_of(RowList(table_offsets=np.array([0, 1, 1, 3]), ids=np.array([7, 8, 9]))) == [(0, 7), (2, 8), (2, 9)]
