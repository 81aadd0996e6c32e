from __future__ import annotations

import torch

from bagpipe.cache.auto_rows import auto_rows, memories_of
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=64),), optimizer="sgd")


def test_a_host_holds_records_bookkeeping_and_plans() -> None:
    for memory in memories_of(SCHEMA, torch.device("cpu"), world_size=3, other_bytes=5):
        assert (memory.slot_bytes, memory.num_sharing, memory.other_bytes) == (256 + 24 + 64, 3, 5)


def test_tables_and_users_bound_the_rows() -> None:
    device = torch.device("cpu")
    assert auto_rows(SCHEMA, device, [300]) == 300
    assert auto_rows(SCHEMA, device, [None], max_rows=40) == 40
    wide = RowSchema(tables=(RowTable(name="t", dim=1 << 16),), optimizer="sgd")  # no host holds the most slots of it
    assert auto_rows(wide, device, [None], num_caches=2) < auto_rows(wide, device, [None])
