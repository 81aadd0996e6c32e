from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from bagpipe.errors import LostRowError
from bagpipe.store.audit import CHUNK_ROWS
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.types.schema import RowSchema, RowTable


def store_of(*names: str, dim: int = 2) -> MemoryStore:
    tables = tuple(RowTable(name=name, dim=dim) for name in names)
    return MemoryStore(RowSchema(tables=tables, optimizer="rowwise_adagrad"))


def test_the_embedding_digest_is_the_documented_bytes() -> None:
    with store_of("users", "items") as store:
        store.claim()
        rows = np.arange(9, dtype=np.float32).reshape(3, 3)
        store.write(0, np.array([5, -1, 2]), rows)
        store.write(1, np.array([7]), rows[:1])
        expected = hashlib.sha256()
        for name, row_id, row in (("items", 7, 0), ("users", -1, 1), ("users", 2, 2), ("users", 5, 0)):
            expected.update(name.encode() + b"\0" + struct.pack("<q", row_id) + rows[row].astype("<f4").tobytes())
        assert embedding_digest(store) == expected.hexdigest()


def test_the_digest_of_half_rows_is_over_their_records() -> None:
    schema = RowSchema(tables=(RowTable(name="t", dim=3),), optimizer="rowwise_adagrad", dtype="bfloat16")
    rows = np.arange(6, dtype=np.uint16).reshape(1, 6)
    with MemoryStore(schema) as store:
        store.claim()
        store.write(0, np.array([5]), rows)
        expected = hashlib.sha256(b"t\0" + struct.pack("<q", 5) + rows.astype("<u2").tobytes())
        assert embedding_digest(store) == expected.hexdigest()


class ForgetfulStore(MemoryStore):
    """A store whose listed ids have no rows any more."""

    def ids(self, table: int) -> NDArray[np.int64]:
        return np.append(super().ids(table), [8, 9])


def test_a_row_that_vanishes_has_no_digest() -> None:
    with ForgetfulStore(RowSchema(tables=(RowTable(name="t", dim=2),), optimizer="rowwise_adagrad")) as store:
        store.claim()
        store.write(0, np.array([5]), np.zeros((1, 3), np.float32))
        with pytest.raises(LostRowError, match=r"table t id 8 vanished while all rows were read \(2 such rows\)"):
            embedding_digest(store)


def test_the_embedding_digest_does_not_depend_on_chunks_or_order() -> None:
    num_rows = CHUNK_ROWS + 3
    rows = np.random.default_rng(0).random((num_rows, 3), dtype=np.float32)
    digests = set()
    for order in (np.arange(num_rows), np.arange(num_rows)[::-1]):
        with store_of("t") as store:
            store.claim()
            store.write(0, order.astype(np.int64), rows[order])
            digests.add(embedding_digest(store))
    assert len(digests) == 1


def test_the_dense_digest_sees_parameters_and_optimizer_state() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    seen = [dense_digest(model, optimizer)]
    assert dense_digest(model, optimizer) == seen[0]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    seen.append(dense_digest(model, optimizer))
    with torch.no_grad():
        model.bias += 1
    seen.append(dense_digest(model, optimizer))
    optimizer.state[model.bias]["exp_avg"] += 1
    seen.append(dense_digest(model, optimizer))
    assert len(set(seen)) == 4
