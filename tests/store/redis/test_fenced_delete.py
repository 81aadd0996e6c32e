"""Fenced deletions: their effect on a real server, and the decoding of their replies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import log_key
from bagpipe.store.interface import DeleteRequest
from bagpipe.store.keys import FIELD_DTYPE, bucket_key
from bagpipe.store.redis.fenced_delete import Deletion
from bagpipe.store.redis.log_guard import ShortLog
from bagpipe.store.redis.resp_rows import ErrorReply
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import take_over
from tests.store.clients import client_of
from tests.store.redis.test_fenced_write import (
    IDS,
    OWNER,
    TOKEN,
    accepted,
    check_rejection,
    guarded,
    opened,
    rows_of,
    snapshot,
)

ALL = [DeleteRequest(0, IDS)]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "own") as server:
        yield server


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    with client_of(own_server.url) as client:
        yield client


# On a server


@pytest.mark.redis
def test_keys_left_in_the_server(own_server: EmbeddedServer, client: redis.Redis) -> None:
    """The bucket, while it has rows, and one element of the log for each group."""
    key, fields = bucket_key("job", 0), [np.array([(0, row_id)], FIELD_DTYPE).tobytes() for row_id in range(4)]
    with opened(own_server.url, "job", 1) as store:
        fence = take_over(store)
        store.write(0, IDS[:3], rows_of(1, 3))
        before = set(snapshot(client))
        store.delete_many([DeleteRequest(0, IDS[1:4])])
        assert client.hkeys(key) == fields[:1]
        store.delete_many([DeleteRequest(0, IDS[:1])])
    assert client.lrange(log_key(key, fence), 0, -1) == [
        b"",
        fields[0] + fields[1] + fields[2],
        fields[1] + fields[2] + fields[3],
        fields[0],
    ]
    assert set(snapshot(client)) == before - {key}, "no key is left of a bucket without rows"


@pytest.mark.redis
@pytest.mark.parametrize("version_before", [0, 1], ids=["no bucket yet", "rows are there"])
def test_a_refused_group_changes_nothing(own_server: EmbeddedServer, client: redis.Redis, version_before: int) -> None:
    with opened(own_server.url, "job") as zombie, opened(own_server.url, "job") as job:
        take_over(zombie)
        if version_before:
            zombie.write(0, IDS, rows_of(1))
        take_over(job, generation=2)
        before = snapshot(client)
        for _ in range(2):
            with pytest.raises(FencedError, match=r"taken over by another start of a job .generation 2, this one is 1"):
                zombie.delete_many(ALL)
        with pytest.raises(FencedError, match="generation 2, this one is 1"):
            zombie.write(0, IDS, rows_of(9))
        assert snapshot(client) == before


@pytest.mark.redis
def test_a_log_that_was_lost_or_forgot_a_group(own_server: EmbeddedServer, client: redis.Redis) -> None:
    key = bucket_key("job", 0)
    with opened(own_server.url, "job", 1) as store:
        fence = take_over(store)
        store.write(0, IDS, rows_of(1))
        store.delete_many([DeleteRequest(0, IDS[:5])])
        client.rpop(log_key(key, fence))
        before = snapshot(client)
        with pytest.raises(RolledBackError, match="acknowledged 2 groups of rows and has 1 in its log"):
            store.delete_many(ALL)
        assert snapshot(client) == before
    with opened(own_server.url, "job", 1) as store:
        fence = take_over(store, generation=2)
        client.delete(log_key(key, fence))
        before = snapshot(client)
        with pytest.raises(RolledBackError, match=r"job:.0.: the store has lost the log"):
            store.delete_many(ALL)
        assert snapshot(client) == before


@pytest.mark.redis
def test_a_missing_right_deletes_nothing(own_server: EmbeddedServer, client: redis.Redis) -> None:
    for command in ("rpushx", "hdel", "eval", "hmget"):
        namespace = f"job-{command}"
        with opened(own_server.url, namespace, 1) as store:
            fence = take_over(store)
            store.write(0, IDS, rows_of(1))
            client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], categories=["+@all"])
            client.execute_command("ACL", "SETUSER", "default", f"-{command}")
            try:
                with pytest.raises(StoreError) as caught:
                    store.delete_many(ALL)
            finally:
                client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        assert re.search("NOPERM|permission|can't run", str(caught.value)), command
        assert "\n" not in str(caught.value)
        assert client.hlen(bucket_key(namespace, 0)) == len(IDS)
        assert client.llen(log_key(bucket_key(namespace, 0), fence)) == (3 if command == "hdel" else 2)


@pytest.mark.redis
def test_a_server_without_memory_changes_nothing(own_server: EmbeddedServer, client: redis.Redis) -> None:
    """The log needs some."""
    with opened(own_server.url, "job") as store:
        take_over(store)
        store.write(0, IDS, rows_of(1))
        before = snapshot(client)
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreError, match="OOM command not allowed"):
            store.delete_many(ALL)
        client.config_set("maxmemory", "0")
        assert snapshot(client) == before


# Replies


def deletion(num_commands: int = 2) -> Deletion:
    return Deletion(token=TOKEN, commands=guarded(num_commands))


def refusal(length: int, owner: bytes = OWNER) -> bytes:
    return b"*1\r\n*3\r\n:2\r\n:%d\r\n" % length + owner


@pytest.mark.parametrize("data", [b":0\r\n", refusal(6)], ids=["now", "before"])
def test_a_group_that_is_deleted(data: bytes) -> None:
    assert accepted(deletion(), data) == 4 + len(data)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (refusal(4), ShortLog, r"job:.1.: the store acknowledged 3 groups of rows and has 2 in its log"),
        (refusal(0), RolledBackError, r"job:.1.: the store has lost the log of this job"),
        (refusal(0, b"$3\r\n9-f\r\n"), FencedError, "generation 9, this one is 7"),
        (b"*1\r\n*3\r\n:1\r\n$2\r\nno\r\n$0\r\n\r\n", ErrorReply, "an error: no"),
        (b"-TRYAGAIN later\r\n", ErrorReply, "an error: TRYAGAIN later"),
        (b":1\r\n", StoreError, "answered 1 to a fenced write"),
        (b"$-1\r\n", StoreError, "answered None to a fenced write"),
        (b"*1\r\n:1\r\n", StoreError, "answered 1 to a fenced write"),
    ],
)  # fmt: skip
def test_a_group_that_is_rejected(data: bytes, kind: type[Exception], message: str) -> None:
    check_rejection(deletion(), data, kind, message)


def test_a_reply_fits_the_room_asked_for() -> None:
    for num_commands in (1, 2, 100):
        longest = b"*%d\r\n" % num_commands
        longest += (b"*3\r\n:100\r\n:1000000000000\r\n" + b"$51\r\n" + b"9" * 51 + b"\r\n") * num_commands
        assert len(longest) <= deletion(num_commands).max_reply_bytes
