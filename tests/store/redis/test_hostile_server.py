"""Every call of a store against a server that answers as none should: it ends, in little memory, with one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.errors import InputError, StoreError
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.redis.store import RedisStore
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.redis.hostile_server import MISBEHAVIOURS, hostile_server

pytestmark = [pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")
IDS = np.arange(20)
TIMEOUT_S = 0.4
#: Some copies of the largest reply, for two connections, where garbage is collected late. Far from "without end".
MAX_GROWTH_BYTES = 256 << 20


def inspect(store: RedisStore) -> None:
    with store.ledger() as ledger:
        ledger.inspect()


def touched(store: RedisStore) -> None:
    with store.ledger() as ledger:
        ledger.touched(0)


def acquire(store: RedisStore) -> None:
    with store.ledger() as ledger:
        ledger.acquire("1-" + "0" * 32)
        ledger.inspect()


def job(store: RedisStore) -> None:
    with store.ledger() as ledger:
        ledger.job()


def state(store: RedisStore) -> None:
    with store.ledger() as ledger:
        ledger.state()


#: Commands, and the call that sends it.
CALLS: dict[str, tuple[str, Callable[[RedisStore], object]]] = {
    "open": ("PING", lambda store: None),
    "check, INFO": ("INFO", lambda store: store.check()),
    "check, schema record": ("HGETALL", lambda store: store.check()),
    "check, rights": ("EVAL", lambda store: store.check()),
    "claim, buckets": ("EXISTS", lambda store: store.claim()),
    "claim, record": ("EXEC", lambda store: store.claim()),
    "ids, length": ("HLEN", lambda store: store.ids(0)),
    "ids, scan": ("HSCAN", lambda store: store.ids(0)),
    "read": ("HMGET", lambda store: store.read_many([(0, IDS)])),
    "write": ("HSET", lambda store: store.write_many([WriteRequest(0, IDS, np.zeros((20, 4), np.float32))])),
    "delete": ("HDEL", lambda store: store.delete_many([DeleteRequest(0, IDS)])),
    "ledger, INFO": ("INFO", inspect),
    "ledger, state": ("EVAL", state),
    "ledger, logs": ("EVAL", touched),
    "ledger, job": ("EVAL", job),
    "ledger, acquire": ("EVAL", acquire),
    "ledger, owners": ("GET", acquire),
}


def peak_bytes() -> int:
    """Largest resident memory since `clear_peak`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10


def clear_peak() -> int:
    """Forget the peak. Returns the resident memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_bytes()


def cases() -> Iterator[Any]:
    """Every call with every misbehaviour; the default run has three calls for each."""
    for first, misbehaviour in enumerate(MISBEHAVIOURS):
        for number, call in enumerate(CALLS):
            is_default = (number - first) % len(CALLS) in (0, 5, 10) or (call == "ids, scan" and "scan" in misbehaviour)
            yield pytest.param(call, misbehaviour, marks=() if is_default else pytest.mark.slow)


@pytest.mark.parametrize(("call", "misbehaviour"), list(cases()))
def test_a_call_ends(tmp_path: Path, call: str, misbehaviour: str) -> None:
    command, run = CALLS[call]
    with hostile_server(tmp_path, command, misbehaviour) as url:
        start_bytes = clear_peak()
        refused = ""
        try:
            with RedisStore(url, schema=SCHEMA, namespace="job", num_buckets=4, timeout_s=TIMEOUT_S) as store:
                run(store)
        except (StoreError, InputError) as error:
            refused = str(error)
        assert "\n" not in refused
        assert refused or call != "ids, scan" or "scan" not in misbehaviour, "a scan that does not end is an error"
        assert peak_bytes() - start_bytes < MAX_GROWTH_BYTES
