"""Each exchange of a writing job fails in turn: acknowledged rows are stored and logged exactly once."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

import pytest

from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import SCHEMA, holds, ids_of, new_name, new_token, rows_of, touched_ids, unfenced
from bagpipe.types.schema import RowSchema
from tests.harness.proxy import ConnectionFault, ConnectionFaultKind, FaultyProxy

pytestmark = pytest.mark.redis

NUM_BUCKETS = 4
SPANS = [(0, 30), (10, 40), (20, 50), (0, 60)]

FAULTS = {
    "an answer is dropped": ConnectionFault(kind=ConnectionFaultKind.DROP_ANSWER),
    "an answer is cut": ConnectionFault(kind=ConnectionFaultKind.CUT_ANSWER, num_bytes=3),
    "a request is cut": ConnectionFault(kind=ConnectionFaultKind.CUT_REQUEST, num_bytes=100),
    "a connection is reset": ConnectionFault(kind=ConnectionFaultKind.RESET),
}


def job(proxy: FaultyProxy, name: str, token: str, log: list[float]) -> None:
    """Four writes, with a rotation after the second. `log` collects the acknowledged ones."""
    with open_store(proxy.url, namespace=name, schema=SCHEMA, buckets=NUM_BUCKETS, timeout_s=2) as store:
        store.fence(Fence(token=token, writer=0, epoch=1))
        for number, span in enumerate(SPANS):
            ids = ids_of(span)
            store.write(0, ids, rows_of(0, ids, float(number)))
            log.append(float(number))
            if number == 1:
                store.rotate()


@pytest.mark.parametrize("name", FAULTS)
def test_a_lost_answer_of_every_exchange(name: str, redis_server: EmbeddedServer, tmp_path: Path) -> None:
    def make(schema: RowSchema, namespace: str) -> Store:
        return open_store(redis_server.url, namespace=namespace, schema=schema, buckets=NUM_BUCKETS)

    fault, num_begun = FAULTS[name], 0
    with FaultyProxy(redis_server.url, listen=tmp_path / "proxy.sock") as proxy:
        for at in itertools.count(1):
            namespace, token, log = new_name(), new_token(1), list[float]()
            with unfenced(make, namespace) as (store, ledger):
                ledger.acquire(token)
                ledger.begin("m:0", 1)
                fired = proxy.num_fired
                proxy.inject(ConnectionFault(kind=fault.kind, at=at, num_bytes=fault.num_bytes))
                # While connecting, the store can be refused.
                with suppress(StoreError, InputError):
                    job(proxy, namespace, token, log)
                proxy.heal()
                assert len(log) in (0, len(SPANS)), "once it has begun, it gets through"
                groups = [sum(log.num_groups for log in state.logs) for state in ledger.state()]
                if log:
                    assert groups == [len(SPANS)] * NUM_BUCKETS, "every group is logged once"
                    assert holds(store, ids_of(SPANS[-1]), float(len(SPANS) - 1))
                    assert touched_ids(ledger).tolist() == ids_of(SPANS[-1]).tolist()
                    num_begun += 1
            if proxy.num_fired == fired:
                break
    assert num_begun > len(SPANS)
