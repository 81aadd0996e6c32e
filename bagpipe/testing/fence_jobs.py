"""Simulated jobs for the fencing checks: a fencing token and one fenced store per writer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest, Rows, Store
from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import bucket_of
from bagpipe.types.schema import RowSchema, RowTable

__all__ = [
    "SCHEMA",
    "Job",
    "MakeStore",
    "drop_all",
    "holds",
    "ids_of",
    "new_name",
    "new_token",
    "raises",
    "rows_of",
    "simulated_job",
    "take_over",
    "touched_ids",
    "unfenced",
]

MakeStore = Callable[[RowSchema, str], Store]

SCHEMA = RowSchema(tables=(RowTable(name="small", dim=3), RowTable(name="wide", dim=64)), optimizer="sgd", seed=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One start of a job: its ledger and a fenced store per writer."""

    token: str
    ledger: Ledger
    stores: tuple[Store, ...]

    def write(self, ids: NDArray[np.int64], value: float, *, writer: int = 0, table: int = 0) -> None:
        self.stores[writer].write(table, ids, rows_of(table, ids, value))

    def delete(self, ids: NDArray[np.int64], *, writer: int = 0, table: int = 0) -> None:
        self.stores[writer].delete_many([DeleteRequest(table, ids)])

    def rotate(self) -> list[NDArray[np.int64]]:
        return [store.rotate() for store in self.stores]


@contextmanager
def simulated_job(
    make_store: MakeStore, name: str, generation: int, *, checkpoint_id: str = "m:0", writers: int = 1
) -> Iterator[Job]:
    """A job that has acquired the namespace and fenced its writers."""
    token = new_token(generation)
    with ExitStack() as stack:
        stores = tuple(stack.enter_context(make_store(SCHEMA, name)) for _ in range(writers))
        ledger = stack.enter_context(stores[0].ledger())
        ledger.acquire(token)
        ledger.begin(checkpoint_id, writers)
        for writer, store in enumerate(stores):
            store.fence(Fence(token=token, writer=writer, epoch=1))
        yield Job(token=token, ledger=ledger, stores=stores)


def take_over(store: Store, *, generation: int = 1, writer: int = 0, num_writers: int = 1) -> Fence:
    """Fence an open store as the trainer does: one writer of a job that has just acquired the namespace, epoch 1."""
    fence = Fence(token=new_token(generation), writer=writer, epoch=1)
    with store.ledger() as ledger:
        ledger.acquire(fence.token)
        ledger.begin("test:0", num_writers)
        ledger.record_job(JobRecord(job=uuid.uuid4().hex, has_checkpoints=False))
    store.fence(fence)
    return fence


@contextmanager
def unfenced(make_store: MakeStore, name: str) -> Iterator[tuple[Store, Ledger]]:
    """A store without a fence and a ledger without a token."""
    with make_store(SCHEMA, name) as store, store.ledger() as ledger:
        yield store, ledger


def new_token(generation: int) -> str:
    return f"{generation}-{uuid.uuid4().hex}"


def new_name() -> str:
    return f"conformance-{uuid.uuid4().hex}"


def ids_of(*spans: tuple[int, int]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans])


def rows_of(table: int, ids: NDArray[np.int64], value: float) -> Rows:
    """Rows that encode their id (first column) and `value`."""
    rows = np.full((len(ids), SCHEMA.row_width(table)), value, np.float32)
    rows[:, 0] = ids % 1009
    return rows


def holds(store: Store, ids: NDArray[np.int64], value: float, table: int = 0) -> bool:
    result = store.read(table, ids)
    return bool(result.found.all()) and result.rows.tobytes() == rows_of(table, ids, value).tobytes()


def touched_ids(ledger: Ledger, table: int = 0) -> NDArray[np.int64]:
    """Sorted ids of one table in all logs. Asserts that each bucket holds only its own ids, once, ascending."""
    parts = [np.empty(0, np.int64)]
    for bucket in range(ledger.num_buckets):
        fields = ledger.touched(bucket)
        tables, ids = fields["table"].astype(np.uint32), fields["id"].astype(np.int64)
        assert (bucket_of(tables, ids, ledger.num_buckets) == bucket).all(), "a row of another bucket"
        order = np.lexsort((ids, tables))
        assert (order == np.arange(len(order))).all(), "not in ascending order"
        parts.append(ids[tables == table])
    ids = np.concatenate(parts)
    assert len(np.unique(ids)) == len(ids), "a row twice"
    return np.sort(ids)


def drop_all(ledger: Ledger) -> None:
    for bucket in range(ledger.num_buckets):
        ledger.drop(bucket)


def raises(kind: type[Exception], call: Callable[[], object]) -> None:
    message = None
    try:
        call()
    except kind as error:
        message = str(error)
    assert message is not None, f"expected {kind.__name__}"
    assert "\n" not in message, f"more than one line: {message}"
