"""Digests that tell whether two runs ended with the same numbers, bit for bit.

dense_digest      SHA-256 of parameters, then optimizer state, in state-dict order
embedding_digest  SHA-256 over all rows of a namespace by (table name, id): name utf-8, 0x00, id int64 LE, record
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.errors import LostRowError
from bagpipe.store.interface import Store
from bagpipe.store.row_sums import RowSums

__all__ = ["dense_digest", "embedding_digest", "state_digest"]

#: Rows read at a time: 16 MiB of 256-byte records.
CHUNK_ROWS = 65_536


def dense_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hex SHA-256 over the dense parameters and buffers, then the optimizer's state."""
    state = optimizer.state_dict()["state"]
    return state_digest(model, (state[number][name] for number in sorted(state) for name in sorted(state[number])))


def state_digest(model: nn.Module, states: Iterable[object]) -> str:
    """`dense_digest` of a model and the values of an optimizer's state, by parameter and by name."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        _update(sha, value)
    for value in states:
        _update(sha, value)
    return sha.hexdigest()


def embedding_digest(store: Store, sums: RowSums | None = None) -> str:
    """Hex SHA-256 over all rows of the namespace. Memory: 8 B per row of the largest table, and one chunk of rows.

    Args:
        store: open store.
        sums: the rows' check words are added to these sums.

    Raises:
        LostRowError: a row vanished meanwhile.
    """
    sha = hashlib.sha256()
    for table in sorted(range(len(store.schema.tables)), key=lambda number: store.schema.tables[number].name):
        name = store.schema.tables[table].name.encode() + b"\0"
        ids = store.ids(table)
        for first in range(0, len(ids), CHUNK_ROWS):
            chunk = ids[first : first + CHUNK_ROWS]
            result = store.read(table, chunk)
            if not result.found.all():
                lost = chunk[~result.found]
                raise LostRowError(
                    f"table {store.schema.tables[table].name} id {lost[0]} vanished while the rows were digested "
                    f"({len(lost)} such rows)"
                )
            if sums is not None:
                sums.add_rows(np.array([table], np.uint32), chunk, result.checks)
            record = np.dtype([("name", f"V{len(name)}"), ("id", "<i8"), ("row", f"V{store.schema.row_bytes(table)}")])
            records = np.empty(len(chunk), dtype=record)
            records["name"] = np.void(name)
            records["id"] = chunk
            rows = np.ascontiguousarray(result.rows, dtype=result.rows.dtype.newbyteorder("<"))
            records["row"] = rows.view(f"V{store.schema.row_bytes(table)}")[:, 0]
            sha.update(records.tobytes())
    return sha.hexdigest()


def _update(sha: Any, value: object) -> None:
    if isinstance(value, Tensor):
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        sha.update(repr(value).encode())
