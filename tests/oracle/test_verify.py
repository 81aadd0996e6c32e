"""The judge must catch every single list perturbed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from bagpipe.batch import Batch
from bagpipe.oracle.plan import CachePlan, ConsumerPlan, FeatureRef, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.verify import PlanError, verify
from tests.oracle.batches import make_batch

SPEC = OracleSpec(
    table_rows=(None, None),
    features=(FeatureRef(feature=0, table=0), FeatureRef(feature=1, table=1)),
    num_slots=8,
    lookahead=3,
)


def run() -> list[tuple[Batch, CachePlan]]:
    rng = np.random.default_rng(3)
    batches = [make_batch(i, [[[int(x)] for x in rng.integers(0, 6, 4)] for _ in range(2)]) for i in range(12)]
    return list(plan_batches(batches, SPEC))


def bumped(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[0] += 1
    return array


def shifted(rows: RowList) -> RowList:
    return RowList(table_offsets=rows.table_offsets, ids=bumped(rows.ids))


CONSUMER: dict[str, Callable[[ConsumerPlan], dict[str, object]]] = {
    "unique": lambda c: {"unique": shifted(c.unique)},
    "inverse": lambda c: {"inverse": bumped(c.inverse)},
    "offsets": lambda c: {"offsets": np.concatenate([c.offsets[:1], c.offsets[1:] + 1])},
    "order": lambda c: {"order": c.order[::-1].copy()},
    "slots": lambda c: {"slots": bumped(c.slots)},
    "owners": lambda c: {"owners": bumped(c.owners)},
    "sync_now": lambda c: {"sync_now": ~c.sync_now},
}
OWNER: dict[str, Callable[[OwnerPlan], dict[str, object]]] = {
    "fetch": lambda o: {"fetch": shifted(o.fetch)},
    "fetch_slots": lambda o: {"fetch_slots": bumped(o.fetch_slots)},
    "fetch_new": lambda o: {"fetch_new": ~o.fetch_new},
    "evict": lambda o: {"evict": shifted(o.evict)},
    "evict_slots": lambda o: {"evict_slots": bumped(o.evict_slots)},
    "evict_after": lambda o: {"evict_after": -1},
    "fetch_after": lambda o: {"fetch_after": -1},
    "num_slots": lambda o: {"num_slots": 1},
}


def index_with_everything(planned: list[tuple[Batch, CachePlan]]) -> int:
    """A batch that evicts, fetches rows known before, and waits for their write-back."""
    for position, (_, plan) in enumerate(planned):
        owner = plan.owners[0]
        if len(owner.evict) and owner.fetch_new.size and not owner.fetch_new.all() and owner.fetch_after >= 0:
            return position
    raise AssertionError("the trace has no such batch")


def test_the_unperturbed_run_passes() -> None:
    assert verify(run(), SPEC) == 12


@pytest.mark.parametrize("name", CONSUMER)
def test_a_perturbed_consumer_is_caught(name: str) -> None:
    planned = run()
    position = index_with_everything(planned)
    batch, plan = planned[position]
    consumer = dataclasses.replace(plan.consumers[0], **CONSUMER[name](plan.consumers[0]))  # type: ignore[arg-type]
    planned[position] = (batch, dataclasses.replace(plan, consumers=(consumer,)))
    with pytest.raises(PlanError):
        verify(planned, SPEC)


@pytest.mark.parametrize("name", OWNER)
def test_a_perturbed_owner_is_caught(name: str) -> None:
    planned = run()
    position = index_with_everything(planned)
    batch, plan = planned[position]
    owner = dataclasses.replace(plan.owners[0], **OWNER[name](plan.owners[0]))  # type: ignore[arg-type]
    planned[position] = (batch, dataclasses.replace(plan, owners=(owner,)))
    with pytest.raises(PlanError):
        verify(planned, SPEC)


def test_a_batch_out_of_order_is_caught() -> None:
    planned = run()
    with pytest.raises(PlanError, match="expected batch 0"):
        verify(planned[1:], SPEC)
