"""Digests that tell whether two runs ended with the same numbers, bit for bit.

dense_digest      SHA-256 of parameters, then optimizer state, in state-dict order
embedding_digest  SHA-256 over all rows of a namespace by (table name, id): name utf-8, 0x00, id int64 LE, record
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.store.audit import every_row
from bagpipe.store.interface import Store
from bagpipe.store.row_sums import RowSums

__all__ = ["dense_digest", "embedding_digest", "state_digest"]


def dense_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hex SHA-256 over the dense parameters and buffers, then the optimizer's state without settings of groups."""
    state = {key: value for key, value in optimizer.state_dict().items() if key != "param_groups"}
    return state_digest(model, _values(state))


def _values(state: object) -> Iterator[object]:
    """What is in the containers of a state, by sorted keys."""
    if isinstance(state, Mapping):
        for key in sorted(state, key=lambda key: (type(key).__name__, key)):
            yield from _values(state[key])
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _values(value)
    else:
        yield state


def state_digest(model: nn.Module, states: Iterable[object]) -> str:
    """`dense_digest` of a model and the values of an optimizer's state, by parameter and by name."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        _update(sha, value)
    for value in states:
        _update(sha, value)
    return sha.hexdigest()


def embedding_digest(
    store: Store, sums: RowSums | None = None, on_rows: Callable[[int], None] = lambda num_rows: None
) -> str:
    """Hex SHA-256 over all rows of the namespace. Memory and errors: see `bagpipe.store.audit.every_row`.

    Args:
        store: open store.
        sums: the rows' check words are added to these sums.
        on_rows: called with the number of rows of each part.
    """
    sha, schema = hashlib.sha256(), store.schema
    by_name = sorted(range(len(schema.tables)), key=lambda number: schema.tables[number].name)
    for table, ids, result in every_row(store, by_name):
        if sums is not None:
            sums.add_rows(np.array([table], np.uint32), ids, result.checks)
        name = schema.tables[table].name.encode() + b"\0"
        record = np.dtype([("name", f"V{len(name)}"), ("id", "<i8"), ("row", f"V{schema.row_bytes(table)}")])
        records = np.empty(len(ids), dtype=record)
        records["name"] = np.void(name)
        records["id"] = ids
        rows = np.ascontiguousarray(result.rows, dtype=result.rows.dtype.newbyteorder("<"))
        records["row"] = rows.view(f"V{schema.row_bytes(table)}")[:, 0]
        sha.update(records.tobytes())
        on_rows(len(ids))
    return sha.hexdigest()


def _update(sha: Any, value: object) -> None:
    if isinstance(value, Tensor):
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        sha.update(repr(value).encode())
