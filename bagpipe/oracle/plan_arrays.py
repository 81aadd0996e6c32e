"""Arrays of a plan: record counts, dtypes, dimensions and lengths, checked before its contents are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from bagpipe.oracle.plan import CachePlan, ConsumerPlan, ExchangePlan, OracleSpec, OwnerPlan, RowList

__all__ = ["violations"]

_DTYPES: dict[str, str] = {
    **dict.fromkeys(("offsets", "order", "slots", "fetch_slots", "evict_slots", "expired_slots"), "int32"),
    **dict.fromkeys(("owned_slots", "serve_offsets", "serve_rows"), "int32"),
    **dict.fromkeys(("push_now", "fetch_new", "pull_now", "owned_pull_now", "owned_push_now"), "bool"),
    "owners": "uint16",
}

#: Per record: fields as long as a list of rows.
_PER_ROW: dict[type, tuple[tuple[str, str], ...]] = {
    ConsumerPlan: (("unique", "slots"), ("unique", "owners"), ("unique", "push_now")),
    OwnerPlan: (
        ("fetch", "fetch_slots"),
        ("fetch", "fetch_new"),
        ("evict", "evict_slots"),
        ("expired", "expired_slots"),
    ),
    ExchangePlan: (("owned", "owned_slots"), ("owned", "owned_pull_now"), ("owned", "owned_push_now")),
}


def violations(plan: CachePlan, spec: OracleSpec) -> Iterator[str]:
    """Wrong record counts, dtypes, dimensions or lengths of a plan, as text. Without any, its contents can be read."""
    many = spec.world_size if spec.world_size > 1 else 0
    counts = tuple(len(part) for part in (plan.consumers, plan.owners, plan.exchanges, plan.examples))
    if counts != (spec.world_size, spec.world_size, many, many):
        yield f"expected a record of each kind for each of {spec.world_size} ranks, got {counts}"
        return
    for rank, examples in enumerate(plan.examples):
        yield from _array_violations(examples, "int32", f"examples of rank {rank}")
    for records in (plan.consumers, plan.owners, plan.exchanges):
        for rank, record in enumerate(records):
            yield from _record_violations(record, spec, f"{type(record).__name__} of rank {rank}")
    for rank, (consumer, exchange) in enumerate(zip(plan.consumers, plan.exchanges, strict=bool(many))):
        if len(exchange.pull_now) != len(consumer.unique):
            yield f"rank {rank} has {len(exchange.pull_now)} pull_now for {len(consumer.unique)} rows"
        if len(exchange.serve_offsets) != spec.world_size + 1:
            yield f"rank {rank} has {len(exchange.serve_offsets)} serve_offsets for {spec.world_size} ranks"


def _record_violations(record: Any, spec: OracleSpec, name: str) -> Iterator[str]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, RowList):
            yield from _rows_violations(value, len(spec.table_rows), f"{field.name} in {name}")
        elif isinstance(value, np.ndarray):
            yield from _array_violations(value, _DTYPES[field.name], f"{field.name} in {name}")
    for rows, field_name in _PER_ROW[type(record)]:
        of_rows, values = getattr(record, rows), getattr(record, field_name)
        expected, got = (0 if found is None else len(found) for found in (of_rows, values))
        if expected != got:
            yield f"{field_name} in {name}: {got} of them for {expected} rows"


def _rows_violations(rows: RowList, num_tables: int, name: str) -> Iterator[str]:
    yield from _array_violations(rows.table_offsets, "int64", f"table_offsets of {name}")
    yield from _array_violations(rows.ids, "int64", f"ids of {name}")
    offsets = rows.table_offsets.tolist()
    if len(offsets) != num_tables + 1 or offsets[0] != 0 or offsets[-1] != len(rows) or offsets != sorted(offsets):
        yield f"table_offsets of {name} do not span {num_tables} tables and {len(rows)} rows"


def _array_violations(array: Any, dtype: str, name: str) -> Iterator[str]:
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        yield f"{name}: expected 1 dimension of {dtype}, got {array.ndim} of {array.dtype}"
