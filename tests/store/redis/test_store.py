"""Refusals and failures of the store, and its data on the servers. Real servers."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError, StoreError
from bagpipe.store.interface import Store, WriteRequest
from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=64), RowTable(name="item", dim=4)), optimizer="sgd")
IDS = np.arange(200, dtype=np.int64)
ROWS = np.arange(200 * 64, dtype=np.float32).reshape(200, 64)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A private server, which a test can reconfigure and stop."""
    with EmbeddedServer(tmp_path / "own") as server:
        yield server


def refused(url: str, *words: str, num_buckets: int = 64, namespace: str = "job", timeout_s: float = 30.0) -> str:
    """The message of entering, checking or claiming, which must fail."""
    with pytest.raises(InputError) as caught:  # noqa: PT012  # whichever of the three refuses
        with RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=num_buckets, timeout_s=timeout_s) as store:
            store.check()
            store.claim()
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message
    return message


def test_rows_of_two_widths_share_the_buckets(redis_server: EmbeddedServer, namespace: str) -> None:
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=2) as store:
        store.write_many([WriteRequest(0, IDS, ROWS), WriteRequest(1, IDS, ROWS[:, :4].copy())])
        item, user = store.read_many([(1, IDS), (0, IDS)])
        assert (user.rows == ROWS).all()
        assert (item.rows == ROWS[:, :4]).all()


# Refusals


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-ttl"])
def test_a_server_that_may_drop_rows(own_server: EmbeddedServer, policy: str) -> None:
    with client_of(own_server.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", policy)
        refused(own_server.url, own_server.url, "104857600", policy, "CONFIG SET maxmemory-policy noeviction")
        client.config_set("maxmemory-policy", "noeviction")
        with RedisStore(own_server.url, schema=SCHEMA) as store:
            assert store.claim()
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(InputError, match=policy):
                store.check()
        assert client.dbsize() == 1


def test_a_password_that_is_missing_or_wrong(own_server: EmbeddedServer) -> None:
    with client_of(own_server.url) as client:
        client.config_set("requirepass", "right")
    url = own_server.url
    for wrong_url in (url, url.replace("unix://", "unix://:wr0ng@"), f"{url}?password=wr0ng"):
        message = refused(wrong_url, "user or password refused")
        assert "wr0ng" not in message
    with RedisStore(own_server.url.replace("unix://", "unix://:right@"), schema=SCHEMA) as store:
        assert store.claim()


def test_a_user_that_may_not_ask(own_server: EmbeddedServer) -> None:
    with client_of(own_server.url) as client:
        client.acl_setuser("few", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-info"])
    refused(own_server.url.replace("unix://", "unix://few:x@"), "user of store.url may not run a command", "info")


def test_no_server_listens(tmp_path: Path) -> None:
    refused(f"unix://{tmp_path}/no.sock", f"unix://{tmp_path}/no.sock", "cannot be reached")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = f"redis://user:***@127.0.0.1:{port}"
    message = refused(endpoint.replace("***", "secret"), endpoint, "cannot be reached")
    assert "secret" not in message


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"+HELLO\r\n"])
def test_another_protocol(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(greeting)
                while sock.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        refused(f"redis://127.0.0.1:{listener.getsockname()[1]}", "store redis://127.0.0.1", timeout_s=0.5)
        thread.join()


def test_a_silent_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refused(f"redis://127.0.0.1:{listener.getsockname()[1]}", "no answer within", "0.1 s", timeout_s=0.1)


def test_one_server_twice(redis_server: EmbeddedServer) -> None:
    refused(f"{redis_server.url},{redis_server.url}?db=0", "twice")


def test_fewer_buckets_than_servers() -> None:
    with pytest.raises(InputError, match=r"store\.buckets = 1 is fewer than the 2 servers"):
        RedisStore("redis://a,redis://b", schema=SCHEMA, num_buckets=1)
    with pytest.raises(InputError, match=r"store\.timeout_s must be greater than 0, got 0"):
        RedisStore("redis://a", schema=SCHEMA, timeout_s=0)


# Failures while the job runs


def opened(url: str, namespace: str = "job", timeout_s: float = 30.0) -> Store:
    return RedisStore(url, schema=SCHEMA, namespace=namespace, timeout_s=timeout_s)


def test_a_killed_server(own_server: EmbeddedServer) -> None:
    with opened(own_server.url) as store:
        store.claim()
        store.write(0, IDS, ROWS)
        os.kill(own_server.process_id, signal.SIGKILL)
        with pytest.raises(StoreError, match=own_server.url):
            store.write(0, IDS, ROWS)
        with pytest.raises(StoreError, match=own_server.url):
            store.read(0, IDS)
        with pytest.raises(StoreError, match="the connection was closed"):
            store.read(0, IDS)
        with pytest.raises(StoreError, match="cannot be reached"):
            store.ids(0)


def test_a_stopped_server_is_given_up_after_the_deadline(own_server: EmbeddedServer) -> None:
    with opened(own_server.url, timeout_s=0.2) as store:
        store.write(0, IDS, ROWS)
        os.kill(own_server.process_id, signal.SIGSTOP)
        try:
            with pytest.raises(StoreError, match=r"within store\.timeout_s = 0\.2 s"):
                store.read(0, IDS)
            with pytest.raises(StoreError, match=r"within store\.timeout_s = 0\.2 s"):
                store.write(0, IDS, ROWS)
        finally:
            os.kill(own_server.process_id, signal.SIGCONT)
        # The connections are closed, so late replies are never read.
        with pytest.raises(StoreError, match="the connection was closed"):
            store.read(0, IDS)


def test_a_server_without_memory_says_so(own_server: EmbeddedServer) -> None:
    with client_of(own_server.url) as client, opened(own_server.url) as store:
        store.claim()
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreError, match="OOM command not allowed"):
            store.write(0, IDS, ROWS)


def test_a_key_of_another_type(redis_server: EmbeddedServer, namespace: str) -> None:
    with client_of(redis_server.url) as client:
        client.set(bucket_key(namespace, 0), "not a hash")
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=1) as store:
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.read(0, IDS)
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.write(0, IDS, ROWS)


@pytest.mark.parametrize("row_bytes", [0, 4, 255, 257, 1024])
def test_a_row_of_another_width(redis_server: EmbeddedServer, namespace: str, row_bytes: int) -> None:
    with client_of(redis_server.url) as client, opened(redis_server.url, namespace, timeout_s=1.0) as store:
        store.write(0, IDS, ROWS)
        for key in client.scan_iter(f"{namespace}:*"):
            client.hset(key, client.hkeys(key)[0], b"x" * row_bytes)
        with pytest.raises(StoreError):
            store.read(0, IDS)


def test_a_store_must_be_entered(redis_server: EmbeddedServer) -> None:
    store = opened(redis_server.url)
    with pytest.raises(StoreError, match="not open"):
        store.read(0, IDS)
    with store:
        with pytest.raises(RuntimeError, match="already open"):
            store.__enter__()
    with pytest.raises(StoreError, match="not open"):
        store.write(0, IDS, ROWS)


def test_bytes_of_the_wire_are_counted(redis_server: EmbeddedServer, namespace: str) -> None:
    with opened(redis_server.url, namespace) as store:
        store.write(0, IDS, ROWS)
        written = store.statistics()
        assert ROWS.nbytes < written.bytes_sent < 1.5 * ROWS.nbytes
        store.read(0, IDS)
        assert store.statistics().bytes_received - written.bytes_received > ROWS.nbytes
