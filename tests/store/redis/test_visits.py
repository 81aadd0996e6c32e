"""What a cluster's nodes answer, and what is sent again. Against real nodes: test_cluster_client."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.errors import RolledBackError, StoreError
from bagpipe.store.redis.fenced_write import ShortLog
from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.resp_rows import decode_ok
from bagpipe.store.redis.routing import BucketCommand
from bagpipe.store.redis.topology import Address, RedirectKind
from bagpipe.store.redis.visits import NodeCommands, PendingCommand, Unserved, in_order

HERE = Address("10.0.0.1", 7000)


def errand(bucket: int, part: int = 0, group: int = 0) -> PendingCommand:
    start = 1000 * bucket + 10 * part
    return PendingCommand(group, BucketCommand(bucket, start, start + 10, part), False)


def bytes_of(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def test_replies_are_those_of_the_errands_in_order() -> None:
    visit = NodeCommands(address=HERE, errands=[errand(bucket) for bucket in range(4)])
    data = b"+OK\r\n-MOVED 5 10.0.0.2:7001\r\n+OK\r\n"
    position: int | None = 0
    for _ in range(3):
        position = visit.accept(decode_ok, bytes_of(data), position or 0, len(data))
    assert position == len(data)
    assert visit.accept(decode_ok, bytes_of(data), len(data), len(data)) is None
    moved, unanswered = visit.unserved()
    assert moved.errand == errand(1)
    assert moved.redirect is not None
    assert (moved.redirect.kind, moved.redirect.address) == (RedirectKind.MOVED, Address("10.0.0.2", 7001))
    assert unanswered == Unserved(errand(3), None)


def test_an_error_that_points_nowhere() -> None:
    data = b"-OOM command not allowed\r\n"
    with pytest.raises(StoreError, match="OOM"):
        NodeCommands(address=HERE, errands=[errand(0)]).accept(decode_ok, bytes_of(data), 0, len(data))


def gap(bucket: int, part: int, group: int = 0) -> Unserved:
    visit = NodeCommands(address=HERE, errands=[errand(bucket, part, group)])

    def accept(buffer: Bytes, start: int, end: int) -> int | None:
        raise ShortLog("a gap", end)

    assert visit.accept(accept, bytes_of(b"xyz"), 0, 3) == 3
    (unserved,) = visit.unserved()
    return unserved


def test_a_gap_behind_what_was_not_served_is_none() -> None:
    waiting = [gap(1, 2), Unserved(errand(2), None), gap(1, 1), Unserved(errand(1, 0), None), gap(1, 0, group=1)]
    expected = [errand(1, 0), errand(1, 1), errand(1, 2), errand(2), errand(1, 0, group=1)]
    assert [again.errand for again in in_order(waiting)] == expected


def test_a_gap_with_nothing_before_it_is_a_loss() -> None:
    with pytest.raises(RolledBackError, match="a gap"):
        in_order([Unserved(errand(0), None), gap(1, 1)])
