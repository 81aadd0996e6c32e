"""`measure_rows`: rows a second of the store's client and of a store server, in the processor time of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bagpipe.cluster.model import RowRates
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from bagpipe.util.temporary_folder import temporary_folder

__all__ = ["measure_rows"]

#: Rows of a batch; a store's costs per batch are small beside it.
_BATCH_ROWS = 10_000
#: Seconds of each measurement: processor times of other processes come in hundredths of a second.
_SECONDS = 1.0


def measure_rows(dims: Sequence[int] = (16, 128)) -> tuple[tuple[RowRates, ...], tuple[RowRates, ...]]:
    """(rates of the client, rates of the server) for rows of some dimensions with Adagrad's state.

    Needs a server, which `EmbeddedServer` finds. Takes about two seconds for each dimension.

    Raises:
        InputError, StoreError: as `EmbeddedServer`.
    """
    clients, servers = [], []
    with temporary_folder("calibration") as folder, EmbeddedServer(folder) as server:
        for dim in sorted(dims):
            schema = RowSchema(tables=(RowTable(name="rows", dim=dim),), optimizer="adagrad")
            with RedisStore(server.url, schema=schema, namespace=f"calibration-{dim}") as store:
                ids = np.arange(_BATCH_ROWS, dtype=np.int64)
                rows = np.ones((_BATCH_ROWS, 2 * dim), np.float32)
                process = server.process_id
                written = _rates(partial(store.write, 0, ids, rows), process)
                read = _rates(partial(store.read, 0, ids), process)
            row_bytes = 8 * dim
            clients.append(RowRates(row_bytes=row_bytes, reads_per_s=read[0], writes_per_s=written[0]))
            servers.append(RowRates(row_bytes=row_bytes, reads_per_s=read[1], writes_per_s=written[1]))
    return tuple(clients), tuple(servers)


def _rates(run: Callable[[], object], server: int) -> tuple[float, float]:
    """Rows per second of processor time of this process and of the server."""
    run()
    own_s, other_s = time.process_time(), _processor_s(server)
    end_s, batches = time.monotonic() + _SECONDS, 0
    while time.monotonic() < end_s:
        run()
        batches += 1
    own_s, other_s = time.process_time() - own_s, _processor_s(server) - other_s
    rows = batches * _BATCH_ROWS
    return rows / own_s, rows / max(other_s, 1 / os.sysconf("SC_CLK_TCK"))


def _processor_s(process: int) -> float:
    """Processor time of a process in seconds (proc(5), stat: utime and stime)."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
