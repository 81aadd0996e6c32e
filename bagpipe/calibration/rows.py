"""`measure_rows`: rows a second of a store server, in its processor time, for a writer with a fence as jobs have."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.cluster.model import RowRates
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.interface import WriteRequest
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from bagpipe.util.processor_time import TICK_S, process_s
from bagpipe.util.temporary_folder import temporary_folder

__all__ = ["line", "measure_rows"]

#: Rows of a table in a small and a large batch; tables as click logs have.
_TABLES = 26
_SMALL, _LARGE = 20, 400
#: Rows of a table in the store, more than processor caches hold.
_STORED = 8_000
#: Batches that follow each other, of random rows.
_BATCHES = 16
#: Seconds of each measurement: processor times of other processes come in hundredths of a second.
_SECONDS = 1.0


def measure_rows(dims: Sequence[int] = (16, 128)) -> tuple[RowRates, ...]:
    """Rates for rows of some dimensions with Adagrad's state. Takes about four seconds for each dimension.

    Raises:
        InputError, StoreError: as `EmbeddedServer`.
    """
    found = []
    with temporary_folder("calibration") as folder, EmbeddedServer(folder) as server, ExitStack() as stack:
        process = server.process_id
        for dim in sorted(dims):
            tables = tuple(RowTable(name=f"t{number}", dim=dim) for number in range(_TABLES))
            schema = RowSchema(tables=tables, optimizer="adagrad")
            store = stack.enter_context(RedisStore(server.url, schema=schema, namespace=f"calibration-{dim}"))
            _take(store, stack)
            store.write_many(_writes([np.arange(_STORED, dtype=np.int64)] * _TABLES, 2 * dim))
            generator, times_s = np.random.default_rng(dim), []
            for rows in (_SMALL, _LARGE):
                batches = [_batch(generator, rows) for _ in range(_BATCHES)]
                writes = [_writes(ids, 2 * dim) for ids in batches]
                reads = [list(enumerate(ids)) for ids in batches]
                times_s.append(
                    (_server_s(store.read_many, reads, process), _server_s(store.write_many, writes, process))
                )
            (read_fixed_s, read_row_s), (write_fixed_s, write_row_s) = (
                line((_SMALL * _TABLES, _LARGE * _TABLES), times) for times in zip(*times_s, strict=True)
            )
            found.append(
                RowRates(
                    row_bytes=8 * dim,
                    reads_per_s=1 / read_row_s,
                    writes_per_s=1 / write_row_s,
                    read_fixed_s=read_fixed_s,
                    write_fixed_s=write_fixed_s,
                )
            )
    return tuple(found)


def line(counts: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """(fixed seconds, seconds of an item) of the line through two measurements; none of them is negative."""
    (few, many), (short_s, long_s) = counts, times_s
    item_s = max(0.0, (long_s - short_s) / (many - few)) if many > few else 0.0
    fixed_s = short_s - few * item_s
    if fixed_s < 0:
        return 0.0, long_s / many
    return fixed_s, item_s


def _take(store: RedisStore, stack: ExitStack) -> None:
    """Write as a job does: with a token, and logs."""
    token = f"1-{uuid.uuid4().hex}"
    ledger = stack.enter_context(store.ledger())
    ledger.acquire(token)
    ledger.begin("calibration:0", 1)
    store.fence(Fence(token=token, writer=0, epoch=1))


def _batch(generator: np.random.Generator, rows: int) -> list[NDArray[np.int64]]:
    """Ids of a batch, by table."""
    return [np.sort(generator.choice(_STORED, rows, replace=False)).astype(np.int64) for _ in range(_TABLES)]


def _writes(ids: Sequence[NDArray[np.int64]], width: int) -> list[WriteRequest]:
    return [WriteRequest(table, own, np.ones((own.size, width), np.float32)) for table, own in enumerate(ids)]


def _server_s(run: Callable[[Any], object], batches: Sequence[Any], server: int) -> float:
    """The server's processor time of a call."""
    run(batches[0])
    before_s, end_s, calls = process_s(server), time.monotonic() + _SECONDS, 0
    while time.monotonic() < end_s:
        run(batches[calls % len(batches)])
        calls += 1
    return max(process_s(server) - before_s, TICK_S) / calls
