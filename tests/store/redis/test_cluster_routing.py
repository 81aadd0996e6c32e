"""Slot tables, redirections, and the order of resent commands. With real nodes: test_cluster_client."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.errors import RolledBackError, StoreError
from bagpipe.store.keys import NUM_SLOTS
from bagpipe.store.redis.cluster_routing import (
    Address,
    NodeCommands,
    PendingCommand,
    Redirect,
    RedirectKind,
    Topology,
    in_order,
    parse_redirect,
    parse_slots,
)
from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.log_guard import ShortLog
from bagpipe.store.redis.resp_rows import decode_ok
from bagpipe.store.redis.routing import BucketCommand

ASKED = Address("asked", 7000)
A, B, C = (Address(f"10.0.0.{number}", 7000) for number in (1, 2, 3))


def node(address: Address) -> list[object]:
    return [address.host.encode(), address.port, b"id", []]


def test_slots_to_masters() -> None:
    topology = parse_slots([[0, 99, node(A), node(C)], [200, 300, node(B)], [100, 120, node(A), node(C)]], ASKED)
    assert topology.masters == (A, B)
    assert topology.replicas == (C,)
    assert [topology.master_of(slot) for slot in (0, 99, 100, 121, 200, 300, 301)] == [A, A, A, None, B, B, None]
    assert topology.num_covered == 222


@pytest.mark.parametrize("host", [b"", None, b"?"])
def test_a_node_that_does_not_know_its_host_is_the_one_asked(host: bytes | None) -> None:
    topology = parse_slots([[0, NUM_SLOTS - 1, [host, 7001, b"id"]]], ASKED)
    assert topology.masters == (Address("asked", 7001),)
    assert topology.num_covered == NUM_SLOTS


@pytest.mark.parametrize(
    "reply",
    [
        b"OK",
        [[0]],
        [[0, 1, []]],
        [[0, 1, [b"host", b"port"]]],
        [["x", 1, node(A)]],
        7,
        [[0, 1, [b"\x1b]0;x\x07host", 7001, b"id"]]],
        [[0, 1, [b"host", port, b"id"]] for port in range(1 << 16)],
    ],
    ids=["status", "no range", "no node", "no port", "no slot", "number", "control characters", "too many masters"],
)
def test_another_answer_is_refused(reply: object) -> None:
    with pytest.raises(StoreError, match="asked:7000: malformed CLUSTER SLOTS reply"):
        parse_slots(reply, ASKED)  # type: ignore[arg-type]


def test_a_slot_that_moved() -> None:
    before = Topology(masters=(A,), replicas=(), owners=np.zeros(NUM_SLOTS, np.int16))
    after = before.with_moved(7, B).with_moved(9, A)
    assert [after.master_of(slot) for slot in (6, 7, 9)] == [A, B, A]
    assert after.masters == (A, B)
    assert before.master_of(7) == A


@pytest.mark.parametrize(
    ("line", "kind", "address"),
    [
        ("MOVED 3999 10.0.0.1:7000", RedirectKind.MOVED, A),
        ("MOVED 3999 :7001", RedirectKind.MOVED, Address("asked", 7001)),
        ("MOVED 3999 ?:7001", RedirectKind.MOVED, Address("asked", 7001)),
        ("ASK 0 ::1:7000", RedirectKind.ASK, Address("::1", 7000)),
        ("TRYAGAIN Multiple keys request during rehashing of slot", RedirectKind.WAIT, None),
        ("CLUSTERDOWN Hash slot not served", RedirectKind.WAIT, None),
        ("LOADING Redis is loading the dataset in memory", RedirectKind.WAIT, None),
        ("READONLY You can't write against a read only replica.", RedirectKind.WAIT, None),
        ("MASTERDOWN Link with MASTER is down", RedirectKind.WAIT, None),
    ],
)
def test_actions_for_unserved_commands(line: str, kind: RedirectKind, address: Address | None) -> None:
    assert parse_redirect(line, ASKED) == Redirect(kind=kind, address=address, line=line)


@pytest.mark.parametrize(
    "line", ["ERR no", "WRONGTYPE x", "MOVED", "MOVED 1", "MOVED 1 host", "MOVED 1 a:x", "moved 1 a:1", "ASKING", ""]
)
def test_any_other_error(line: str) -> None:
    assert parse_redirect(line, ASKED) is None


def test_an_address_reads_as_in_a_url() -> None:
    assert [str(Address("a", 1)), str(Address("::1", 2))] == ["a:1", "[::1]:2"]


# Commands that are sent again

HERE = Address("10.0.0.1", 7000)


def pending(bucket: int, part: int = 0, group: int = 0) -> PendingCommand:
    start = 1000 * bucket + 10 * part
    return PendingCommand(group, BucketCommand(bucket, start, start + 10, part))


def bytes_of(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def test_replies_come_in_the_order_of_the_commands() -> None:
    node = NodeCommands(address=HERE, commands=[pending(bucket) for bucket in range(4)])
    data = b"+OK\r\n-MOVED 5 10.0.0.2:7001\r\n+OK\r\n"
    position: int | None = 0
    for _ in range(3):
        position = node.accept(decode_ok, bytes_of(data), position or 0, len(data))
    assert position == len(data)
    assert node.accept(decode_ok, bytes_of(data), len(data), len(data)) is None
    moved, unanswered = node.unserved()
    assert moved.unanswered() == pending(1)
    assert moved.redirect is not None
    assert (moved.redirect.kind, moved.redirect.address) == (RedirectKind.MOVED, Address("10.0.0.2", 7001))
    assert unanswered == pending(3)


def test_an_error_that_points_nowhere() -> None:
    data = b"-OOM command not allowed\r\n"
    with pytest.raises(StoreError, match="OOM"):
        NodeCommands(address=HERE, commands=[pending(0)]).accept(decode_ok, bytes_of(data), 0, len(data))


def gap(bucket: int, part: int, group: int = 0) -> PendingCommand:
    node = NodeCommands(address=HERE, commands=[pending(bucket, part, group)])

    def accept(buffer: Bytes, start: int, end: int) -> int | None:
        raise ShortLog("a gap", end)

    assert node.accept(accept, bytes_of(b"xyz"), 0, 3) == 3
    (unserved,) = node.unserved()
    return unserved


def test_a_gap_after_an_unserved_command_is_no_loss() -> None:
    waiting = [gap(1, 2), pending(2), gap(1, 1), pending(1, 0), gap(1, 0, group=1)]
    expected = [pending(1, 0), pending(1, 1), pending(1, 2), pending(2), pending(1, 0, group=1)]
    assert [command.unanswered() for command in in_order(waiting)] == expected


def test_a_gap_with_nothing_before_it_is_a_loss() -> None:
    with pytest.raises(RolledBackError, match="a gap"):
        in_order([pending(0), gap(1, 1)])
