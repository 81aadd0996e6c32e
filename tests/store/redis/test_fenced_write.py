"""Fenced transactions: their effect on a real server, and the decoding of their replies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import CorruptRowError, FencedError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence, log_key, logs_key, open_key, owner_key
from bagpipe.store.interface import Rows
from bagpipe.store.keys import FIELD_DTYPE, bucket_key
from bagpipe.store.redis.fenced_delete import Deletion
from bagpipe.store.redis.fenced_write import Rotation, Transaction
from bagpipe.store.redis.log_guard import GuardedCommand, ShortLog
from bagpipe.store.redis.resp_rows import ErrorReply
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import take_over
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import await_true

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=16),), optimizer="sgd")
IDS = np.arange(50, dtype=np.int64)
TOKEN = "7-" + "0" * 32


def rows_of(version: int, num_rows: int = 50) -> Rows:
    return np.full((num_rows, 16), version, np.float32)


def opened(url: str, namespace: str, num_buckets: int = 2) -> RedisStore:
    return RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=num_buckets)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "own") as server:
        yield server


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    with client_of(own_server.url) as client:
        yield client


def snapshot(client: redis.Redis) -> dict[bytes, object]:
    """All data of the server, by key."""
    read = {b"hash": client.hgetall, b"set": client.smembers, b"string": client.get}
    return {
        key: client.lrange(key, 0, -1) if client.type(key) == b"list" else read[client.type(key)](key)
        for key in client.scan_iter()
    }


# On a server


@pytest.mark.redis
def test_keys_left_in_the_server(own_server: EmbeddedServer, client: redis.Redis) -> None:
    with opened(own_server.url, "job", 1) as store:
        fence = take_over(store)
        store.write(0, IDS[:2], rows_of(1, 2))
        store.write(0, IDS[1:3], rows_of(2, 2))
        assert store.rotate().tolist() == [2]
    key, following = bucket_key("job", 0), Fence(token=fence.token, writer=0, epoch=2)
    fields = [np.array([(0, row_id)], FIELD_DTYPE).tobytes() for row_id in range(3)]
    assert client.lrange(log_key(key, fence), 0, -1) == [b"", fields[0] + fields[1], fields[1] + fields[2]]
    assert client.lrange(log_key(key, following), 0, -1) == [b""]
    assert sorted(client.hkeys(key)) == fields
    assert client.smembers(logs_key(key)) == {f"{fence.token}:{epoch}:0".encode() for epoch in (1, 2)}
    assert not client.exists(open_key(key))


@pytest.mark.redis
@pytest.mark.parametrize("version_before", [0, 1], ids=["no bucket yet", "rows are there"])
def test_a_refused_group_changes_nothing(own_server: EmbeddedServer, client: redis.Redis, version_before: int) -> None:
    with opened(own_server.url, "job") as zombie, opened(own_server.url, "job") as job:
        take_over(zombie)
        if version_before:
            zombie.write(0, IDS, rows_of(1))
        take_over(job, generation=2)
        before = snapshot(client)
        with pytest.raises(FencedError, match=r"taken over by another start of a job \(generation 2, this one is 1\)"):
            zombie.write(0, IDS, rows_of(9))
        assert snapshot(client) == before


@pytest.mark.redis
@pytest.mark.parametrize("version_before", [0, 1])
def test_a_log_that_was_lost(own_server: EmbeddedServer, client: redis.Redis, version_before: int) -> None:
    with opened(own_server.url, "job") as store:
        fence = take_over(store)
        if version_before:
            store.write(0, IDS, rows_of(1))
        client.delete(log_key(bucket_key("job", 0), fence))
        before = snapshot(client)
        with pytest.raises(RolledBackError, match=r"job:.0.: the store has lost the log"):
            store.write(0, IDS, rows_of(9))
        after = snapshot(client)
        assert {key for key in before if before[key] != after[key]} <= {
            bucket_key("job", 1),
            log_key(bucket_key("job", 1), fence),
        }, "the other bucket was written, this one was not"


@pytest.mark.redis
def test_a_log_that_forgot_a_group(own_server: EmbeddedServer, client: redis.Redis) -> None:
    with opened(own_server.url, "job", 1) as store:
        fence = take_over(store)
        for version in (1, 2):
            store.write(0, IDS, rows_of(version))
        client.rpop(log_key(bucket_key("job", 0), fence))
        before = snapshot(client)
        with pytest.raises(RolledBackError, match="acknowledged 2 groups of rows and has 1 in its log"):
            store.rotate()
        with pytest.raises(RolledBackError, match="acknowledged 2 groups of rows and has 1 in its log"):
            store.write(0, IDS, rows_of(3))
        assert snapshot(client) == before


@pytest.mark.redis
def test_a_missing_right_never_loses_a_logged_row(own_server: EmbeddedServer, client: redis.Redis) -> None:
    """Without any one right, every written row is logged, and none is lost."""
    for command in ("rpushx", "rename", "renamenx", "del", "exists", "hdel", "eval", "multi", "exec", "hset"):
        namespace = f"job-{command}"
        with opened(own_server.url, namespace, 1) as store:
            fence = take_over(store)
            store.write(0, IDS, rows_of(1))
            client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], categories=["+@all"])
            client.execute_command("ACL", "SETUSER", "default", f"-{command}")
            try:
                errors = []
                try:
                    store.write(0, IDS, rows_of(2))
                except StoreError as error:
                    errors.append(str(error))
            finally:
                client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        key = bucket_key(namespace, 0)
        logged = client.llen(log_key(key, fence)) - 2
        with opened(own_server.url, namespace, 1) as store:
            result = store.read(0, IDS)
        if command == "renamenx":  # renamed, and not renamed back: the loss is detected
            assert not result.found.any()
        else:
            assert result.found.all(), command
            written = bool((result.rows == rows_of(2)).all())
            assert written or (result.rows == rows_of(1)).all(), command
            assert logged >= written, f"{command}: written and not logged"
        if command in ("exists", "hdel", "del"):  # used only by rejections
            assert not errors, errors
        else:
            expected = "answered 0 to a fenced write" if command == "rename" else "NOPERM|permission|can't run|EXEC"
            assert re.search(expected, errors[0])
            assert "\n" not in errors[0]


@pytest.mark.redis
def test_leftovers_of_an_unfinished_group_are_not_rows(own_server: EmbeddedServer, client: redis.Redis) -> None:
    """The open name of a bucket can hold leftovers of an unfinished group."""
    for version in (0, 1):
        namespace = f"job-{version}"
        with opened(own_server.url, namespace, 1) as store:
            take_over(store)
            if version:
                store.write(0, IDS, rows_of(1))
            client.hset(open_key(bucket_key(namespace, 0)), "stray", "row")
            store.write(0, IDS[:3], rows_of(2, 3))
        assert client.hlen(bucket_key(namespace, 0)) == (50 if version else 3)
        assert not client.exists(open_key(bucket_key(namespace, 0)))


@pytest.mark.redis
def test_a_server_without_memory_changes_nothing(own_server: EmbeddedServer, client: redis.Redis) -> None:
    with opened(own_server.url, "job") as store:
        take_over(store)
        store.write(0, IDS, rows_of(1))
        before = snapshot(client)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreError, match="OOM command not allowed"):
            store.write(0, IDS, rows_of(2))
        client.config_set("maxmemory", "0")
        assert snapshot(client) == before
    with opened(own_server.url, "job") as store:
        take_over(store, generation=2)
        before = snapshot(client)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreError, match="OOM command not allowed"):
            store.rotate()
        client.config_set("maxmemory", "0")
        assert snapshot(client) == before


@pytest.mark.redis
def test_a_server_that_fills_up_while_it_is_written(own_server: EmbeddedServer, client: redis.Redis) -> None:
    """Groups are written as a whole or not at all, and every logged group is in its bucket."""
    ids = np.arange(40_000, dtype=np.int64)
    with opened(own_server.url, "job", 8) as store:
        fence = take_over(store)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (1 << 20))
        with pytest.raises(StoreError, match="OOM command not allowed"):
            store.write(0, ids, rows_of(1, len(ids)))
    client.config_set("maxmemory", "0")
    logged = 0
    for bucket in range(8):
        key = bucket_key("job", bucket)
        fields = b"".join(client.lrange(log_key(key, fence), 0, -1))
        assert len(fields) == 12 * client.hlen(key)
        assert not client.exists(open_key(key))
        logged += client.hlen(key)
    assert 0 < logged < len(ids)


@pytest.mark.redis
def test_a_server_that_cannot_save_says_so(own_server: EmbeddedServer, client: redis.Redis, tmp_path: Path) -> None:
    with opened(own_server.url, "job") as store:
        take_over(store)
        store.write(0, IDS, rows_of(1))
        before = snapshot(client)
        client.config_set("save", "3600 1")
        (tmp_path / "own" / "dump.rdb").mkdir()  # prevents the file
        client.bgsave()
        await_true(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "the background save to fail")
        with pytest.raises(StoreError, match="MISCONF"):
            store.write(0, IDS, rows_of(2))
        client.config_set("stop-writes-on-bgsave-error", "no")
        client.config_set("save", "")  # else it tries again at shutdown
        assert snapshot(client) == before


@pytest.mark.redis
def test_a_damaged_row_is_named(own_server: EmbeddedServer, client: redis.Redis) -> None:
    key, field = bucket_key("job", 0), np.array([(0, 7)], FIELD_DTYPE).tobytes()
    other = np.array([(0, 8)], FIELD_DTYPE).tobytes()
    with opened(own_server.url, "job", 1) as store:
        store.write(0, IDS, rows_of(1))
        value = client.hget(key, field)
        for damaged in (
            bytes([value[0] ^ 1]) + value[1:],
            value[:-1] + bytes([value[-1] ^ 128]),
            client.hget(key, other),
        ):
            client.hset(key, field, damaged)
            with pytest.raises(
                CorruptRowError, match=f"{own_server.url}: table 'user' id 7 .bucket 0. came back damaged"
            ):
                store.read(0, IDS)
            assert store.read(0, IDS[:5]).found.all(), "the connection is none the worse"
        client.hset(key, field, value)
        assert (store.read(0, IDS).rows == rows_of(1)).all()


# Replies


def guarded(num_commands: int, length: int = 5) -> tuple[GuardedCommand, ...]:
    return tuple(
        GuardedCommand(bucket=b"job:{%d}" % bucket, open=b"o", log=b"l", length=length, num_rows=3)
        for bucket in range(num_commands)
    )


def transaction(num_commands: int = 2, length: int = 5) -> Transaction:
    return Transaction(token=TOKEN, commands=guarded(num_commands, length))


def accepted(of: Transaction | Deletion, data: bytes) -> int | None:
    """Offset after a reply that follows four other bytes; every prefix of it must give None."""
    for cut in range(len(data)):
        assert of.accept(np.frombuffer(b"????" + data, np.uint8), 4, 4 + cut) is None
    return of.accept(np.frombuffer(b"????" + data + b":1\r\n", np.uint8), 4, 4 + len(data))


def check_rejection(of: Transaction | Deletion, data: bytes, kind: type[Exception], message: str) -> None:
    """An error of exactly this kind, which knows where the reply ends if the rest of the replies can be read."""
    with pytest.raises(kind, match=message) as caught:
        accepted(of, data)
    assert type(caught.value) is kind
    if isinstance(caught.value, ShortLog | ErrorReply):
        assert caught.value.end == 4 + len(data)


QUEUED = b"+OK\r\n" + b"+QUEUED\r\n" * 4
OWNER = b"$34\r\n" + TOKEN.encode() + b"\r\n"


def refusal(length: int, owner: bytes = OWNER) -> bytes:
    return b"*4\r\n*1\r\n*3\r\n:2\r\n:%d\r\n" % length + owner + b":0\r\n:3\r\n:1\r\n"


@pytest.mark.parametrize(
    "data",
    [QUEUED + b"*4\r\n:0\r\n:3\r\n:0\r\n:2\r\n", QUEUED + b"*4\r\n:0\r\n:0\r\n:0\r\n:2\r\n", QUEUED + refusal(6)],
    ids=["new", "replaced", "again"],
)
def test_a_group_that_is_written(data: bytes) -> None:
    assert accepted(transaction(), data) == 4 + len(data)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (QUEUED + refusal(4), ShortLog, r"job:.1.: the store acknowledged 3 groups of rows and has 2 in its log"),
        (QUEUED + refusal(0), RolledBackError, r"job:.1.: the store has lost the log of this job"),
        (QUEUED + refusal(0, b"$0\r\n\r\n"), RolledBackError, "has lost the log"),
        (QUEUED + refusal(0, b"$3\r\n9-f\r\n"), FencedError, "generation 9, this one is 7"),
        (QUEUED + b"*4\r\n*1\r\n*3\r\n:1\r\n$2\r\nno\r\n$0\r\n\r\n:0\r\n:0\r\n:1\r\n", ErrorReply, "an error: no"),
        (QUEUED + b"*4\r\n-ERR no script\r\n:3\r\n:3\r\n:0\r\n", StoreError, "an error: ERR no script"),
        (QUEUED + b"*4\r\n:0\r\n:3\r\n-WRONGTYPE x\r\n:2\r\n", StoreError, "an error: WRONGTYPE x"),
        (QUEUED + b"*4\r\n:0\r\n:3\r\n:4\r\n:2\r\n", StoreError, "answered 4 to a fenced write"),
        (QUEUED + b"*4\r\n:0\r\n:3\r\n:0\r\n:1\r\n", StoreError, "answered 1 to a fenced write"),
        (QUEUED + b"*3\r\n:0\r\n:3\r\n:0\r\n", StoreError, "to a transaction of 2 commands"),
        (QUEUED + b"*-1\r\n", StoreError, "answered None to a transaction"),
        (QUEUED + b"-EXECABORT Transaction discarded because of: OOM x\r\n", ErrorReply, "answered an error: OOM x"),
        (b"+OK\r\n" * 6, StoreError, "to a transaction"),
    ],
)  # fmt: skip
def test_a_group_that_is_rejected(data: bytes, kind: type[Exception], message: str) -> None:
    check_rejection(transaction(), data, kind, message)


def test_a_redirection_spans_all_of_the_answers() -> None:
    data = (
        b"+OK\r\n-MOVED 12 10.0.0.1:7000\r\n-MOVED 12 10.0.0.1:7000\r\n+QUEUED\r\n+QUEUED\r\n"
        b"-EXECABORT Transaction discarded because of previous errors.\r\n"
    )
    with pytest.raises(ErrorReply) as caught:
        accepted(transaction(), data)
    assert (caught.value.line, caught.value.start, caught.value.end) == ("MOVED 12 10.0.0.1:7000", 4, 4 + len(data))


def test_a_reply_fits_the_room_asked_for() -> None:
    for num_commands in (1, 2, 100):
        longest = b"*%d\r\n" % (num_commands + 2) + b"*%d\r\n" % num_commands
        longest += (b"*3\r\n:100\r\n:1000000000000\r\n" + b"$51\r\n" + b"9" * 51 + b"\r\n") * num_commands
        longest += b":0\r\n" + b":65536\r\n" * num_commands
        queued = b"+OK\r\n" + b"+QUEUED\r\n" * (num_commands + 2)
        assert len(queued + longest) <= transaction(num_commands).max_reply_bytes


ROTATION = Rotation(
    token=TOKEN, bucket=b"j", log=b"l", length=3, next_log=b"n", next_name=b"x", logs=b"s", owner=owner_key(b"j")
)  # fmt: skip


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"*2\r\n:2\r\n" + OWNER, ShortLog),
        (b"*2\r\n:0\r\n" + OWNER, RolledBackError),
        (b"*2\r\n:0\r\n$3\r\n9-f\r\n", FencedError),
        (b"-TRYAGAIN later\r\n", ErrorReply),
        (b":3\r\n", StoreError),
    ],
)
def test_a_rotation_that_is_refused(data: bytes, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        ROTATION.accept(np.frombuffer(data, np.uint8), 0, len(data))
    assert type(caught.value) is kind
    if isinstance(caught.value, ShortLog | ErrorReply):
        assert caught.value.end == len(data)


def test_a_rotation() -> None:
    data = np.frombuffer(b"*2\r\n:3\r\n" + OWNER, np.uint8)
    assert [ROTATION.accept(data, 0, end) for end in range(len(data))] == [None] * len(data)
    assert ROTATION.accept(data, 0, len(data)) == len(data)
