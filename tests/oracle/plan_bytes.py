"""Plans as bytes, to compare whole plans."""

from __future__ import annotations

import dataclasses

import numpy as np

from bagpipe.oracle.plan import CachePlan, ConsumerPlan, ExchangePlan, OwnerPlan

__all__ = ["as_bytes"]


def as_bytes(plan: CachePlan) -> bytes:
    """All arrays and numbers of a plan."""
    parts = [examples.tobytes() for examples in plan.examples]
    records: tuple[ConsumerPlan | OwnerPlan | ExchangePlan, ...] = (*plan.consumers, *plan.owners, *plan.exchanges)
    for record in records:
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            rows = [value.table_offsets, value.ids] if hasattr(value, "ids") else [np.asarray(value)]
            parts.extend(array.tobytes() for array in rows)
    return b"|".join(parts)
