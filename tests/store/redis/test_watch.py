from __future__ import annotations

import pytest

from bagpipe.errors import StoreError
from bagpipe.store.redis.watch import Watch

HEALTHY: dict[str, object] = {
    "run_id": "a1",
    "role": "master",
    "evicted_keys": 3,
    "expired_keys": 5,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}


def looked(*, durability: str = "always", **changes: object) -> bool:
    watch = Watch([("there", HEALTHY), ("elsewhere", HEALTHY)], durability)
    return watch.look([("there", HEALTHY | changes), ("elsewhere", HEALTHY)])


def test_nothing_happened() -> None:
    assert looked() is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_id": "b2"}, "started again while the job ran: run_id was a1, is b2"),
        ({"role": "slave"}, "was a master and is a slave now"),
        ({"evicted_keys": 4}, "has dropped keys for want of memory: evicted_keys was 3, is 4"),
        ({"maxmemory": 10, "maxmemory_policy": "allkeys-lru"}, "drops rows when full"),
        ({"aof_last_write_status": "err"}, "cannot write its append-only file"),
        ({"aof_enabled": 0}, "appendonly is no by now"),
    ],
)
def test_what_must_not_happen(changes: dict[str, object], said: str) -> None:
    with pytest.raises(StoreError, match=f"store there:? .*{said}|store there: {said}") as caught:
        looked(**changes)
    assert "\n" not in str(caught.value)


def test_persistence_matters_only_if_asked_for() -> None:
    assert looked(durability="memory", aof_enabled=0, aof_last_write_status="err") is False


def test_statistics_may_be_reset() -> None:
    watch = Watch([("there", HEALTHY)], "memory")
    watch.look([("there", HEALTHY | {"evicted_keys": 0, "expired_keys": 0})])
    with pytest.raises(StoreError, match="evicted_keys was 0, is 2"):
        watch.look([("there", HEALTHY | {"evicted_keys": 2})])


def test_expired_keys_are_told_once() -> None:
    watch = Watch([("there", HEALTHY)], "memory")
    later = [("there", HEALTHY | {"expired_keys": 6})]
    assert [watch.look(later), watch.look(later)] == [True, False]


def test_nodes_of_a_cluster_come_and_go() -> None:
    watch = Watch([("one", HEALTHY), ("two", HEALTHY)], "memory")
    assert watch.look([("one", HEALTHY), ("three", HEALTHY | {"run_id": "c3"})]) is False
    assert watch.look([("one", HEALTHY), ("two", HEALTHY | {"run_id": "d4"})]) is False
    with pytest.raises(StoreError, match="store two was started again"):
        watch.look([("two", HEALTHY)])
