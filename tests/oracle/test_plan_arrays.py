"""Wrong arrays of a plan are named."""

from __future__ import annotations

import dataclasses

import numpy as np

from bagpipe.oracle.plan import CachePlan, FeatureRef, OracleSpec
from bagpipe.oracle.plan_arrays import violations
from bagpipe.oracle.planner import plan_batches
from tests.oracle.batches import make_batch

TWO_RANKS = OracleSpec(
    table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=9, lookahead=1, world_size=2
)


def smallest_plan(spec: OracleSpec = TWO_RANKS) -> CachePlan:
    ((_, plan),) = plan_batches([make_batch(0, [[[1], [2]]])], spec)
    return plan


def test_plans_of_the_planner_are_valid() -> None:
    assert list(violations(smallest_plan(), TWO_RANKS)) == []
    alone = dataclasses.replace(TWO_RANKS, world_size=1)
    assert list(violations(smallest_plan(alone), alone)) == []


def test_records_are_counted() -> None:
    plan = dataclasses.replace(smallest_plan(), exchanges=())
    assert list(violations(plan, TWO_RANKS)) == ["expected a record of each kind for each of 2 ranks, got (2, 2, 0, 2)"]


def test_dtypes_dimensions_and_lengths_are_named() -> None:
    plan = smallest_plan()
    wide = dataclasses.replace(plan.consumers[1], slots=plan.consumers[1].slots.astype(np.int64))
    longer = dataclasses.replace(plan.owners[0], fetch_slots=np.arange(2, dtype=np.int32))
    broken = dataclasses.replace(plan, consumers=(plan.consumers[0], wide), owners=(longer, plan.owners[1]))
    assert list(violations(broken, TWO_RANKS)) == [
        "slots in ConsumerPlan of rank 1: expected 1 dimension of int32, got 1 of int64",
        "fetch_slots in OwnerPlan of rank 0: 2 of them for 1 rows",
    ]
