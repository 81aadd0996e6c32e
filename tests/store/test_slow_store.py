from __future__ import annotations

import threading

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store.interface import DeleteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.slow_store import Gate, SlowStore
from bagpipe.types.schema import RowSchema, RowTable

pytestmark = pytest.mark.usefixtures("no_leaks")
SCHEMA = RowSchema(tables=(RowTable(name="t", dim=2),), optimizer="sgd")
IDS = np.arange(3, dtype=np.int64)
ROWS = np.ones((3, 2), np.float32)


def test_a_held_write_is_not_seen_before_it_is_released() -> None:
    with SlowStore(MemoryStore(SCHEMA)) as store:
        store.write_gate.hold()
        writer = threading.Thread(target=store.write, args=(0, IDS, ROWS))
        writer.start()
        store.write_gate.wait_arrived(1)
        assert not store.read(0, IDS).found.any(), "reads pass while writes wait"
        store.write_gate.release()
        writer.join()
        assert store.read(0, IDS).found.all()


def test_a_gate_lets_through_as_many_as_allowed() -> None:
    gate, passed = Gate(), []
    gate.hold()

    def go(number: int) -> None:
        gate.pass_through()
        passed.append(number)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    gate.wait_arrived(3)
    assert passed == []
    gate.allow(3)
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1, 2]
    assert gate.arrived == 3


def test_waiting_for_calls_that_do_not_come() -> None:
    with pytest.raises(TimeoutError, match="expected 1 calls at the gate, got 0"):
        Gate().wait_arrived(1, timeout_s=0.01)


def test_failures_on_demand() -> None:
    with SlowStore(MemoryStore(SCHEMA)) as store:
        store.write(0, IDS, ROWS)
        store.fail_writes(StoreError("disk on fire"))
        with pytest.raises(StoreError, match="disk on fire"):
            store.write(0, IDS, 2 * ROWS)
        with pytest.raises(StoreError, match="disk on fire"):
            store.delete_many([DeleteRequest(0, IDS)])
        assert (store.read(0, IDS).rows == ROWS).all()
        store.fail_reads(StoreError("no answer"))
        with pytest.raises(StoreError, match="no answer"):
            store.read(0, IDS)
