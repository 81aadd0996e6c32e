"""Schema records, keys, and the agreement of several servers (here: databases of one server)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bagpipe.errors import InputError
from bagpipe.store.keys import FIELD_DTYPE, bucket_key, meta_key
from bagpipe.store.redis.namespace import scanned
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=64), RowTable(name="item", dim=4)), optimizer="sgd")
IDS = np.arange(200, dtype=np.int64)
ROWS = np.arange(200 * 64, dtype=np.float32).reshape(200, 64)


def refused(url: str, *words: str, namespace: str) -> None:
    with RedisStore(url, schema=SCHEMA, namespace=namespace) as store:
        for refuse in (store.check, store.claim):
            with pytest.raises(InputError) as caught:
                refuse()
            assert not [word for word in words if word not in str(caught.value)], caught.value


def test_servers_in_another_order_or_number(redis_server: EmbeddedServer, namespace: str) -> None:
    one, two, three = (f"{redis_server.url}?db={number}" for number in (1, 2, 3))
    with RedisStore(f"{one},{two}", schema=SCHEMA, namespace=namespace) as store:
        assert store.claim()
        store.write(0, IDS, ROWS)
        assert (store.ids(0) == IDS).all()
        assert store.num_rows().tolist() == [len(IDS), *[0] * (len(SCHEMA.tables) - 1)]
    refused(f"{two},{one}", "server position '1', this job has '0'", namespace=namespace)
    refused(one, "number of servers '2', this job has '1'", namespace=namespace)
    refused(f"{one},{two},{three}", "number of servers '2', this job has '3'", namespace=namespace)
    refused(f"{one},{three}", three, "lost its data", namespace=namespace)
    refused(f"{three},{two}", three, "lost its data", namespace=namespace)
    with client_of(three) as client:
        assert client.dbsize() == 0, "a refused store wrote something"


def test_a_claim_that_was_cut_short_is_completed(redis_server: EmbeddedServer, namespace: str) -> None:
    one, two = (f"{redis_server.url}?db={number}" for number in (4, 5))
    with RedisStore(f"{one},{two}", schema=SCHEMA, namespace=namespace) as store:
        assert store.claim()
        with client_of(one) as client:
            client.delete(meta_key(namespace))
        assert store.check() is False
        assert store.claim() is True
        assert store.check() is True


def test_buckets_that_differ(redis_server: EmbeddedServer, namespace: str) -> None:
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=16) as store:
        store.claim()
    refused(redis_server.url, "store.buckets '16', this job has '64'", namespace=namespace)


def test_rows_without_a_record(redis_server: EmbeddedServer, namespace: str) -> None:
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace) as store:
        store.write(0, IDS, ROWS)
    refused(redis_server.url, "holds rows but no schema record", namespace=namespace)


def test_rows_can_be_read_by_other_tools(redis_server: EmbeddedServer, namespace: str) -> None:
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=1) as store:
        store.claim()
        store.write(1, IDS[:1], ROWS[:1, :4])
    with client_of(redis_server.url) as client:
        assert set(client.keys(f"{namespace}*")) == {bucket_key(namespace, 0), meta_key(namespace)}
        field = np.array([(1, 0)], FIELD_DTYPE).tobytes()
        value = client.hgetall(bucket_key(namespace, 0)).pop(field)
        assert value[:16] == ROWS[0, :4].tobytes()
        assert len(value) == 24, "and a check word"
        record = client.hgetall(meta_key(namespace))
        assert json.loads(record[b"schema"]) == json.loads(json.dumps(SCHEMA.to_json()))
        assert record[b"buckets"] == b"1"


def test_ids_are_listed_without_scan_too(redis_server: EmbeddedServer, namespace: str) -> None:
    """Older servers do not support HSCAN NOVALUES."""
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace) as store:
        store.write(0, IDS, ROWS)
        with client_of(redis_server.url) as client:
            client.acl_setuser("old", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-hscan"])
        try:
            old_url = redis_server.url.replace("unix://", "unix://old:x@")
            with RedisStore(old_url, schema=SCHEMA, namespace=namespace) as old:
                assert (old.ids(0) == IDS).all()
                assert len(old.ids(1)) == 0
                assert old.num_rows()[0] == len(IDS)
        finally:
            with client_of(redis_server.url) as client:
                client.acl_deluser("old")


def test_ids_of_a_large_bucket_are_listed_step_by_step(redis_server: EmbeddedServer, namespace: str) -> None:
    """With their rows, from a server that does not support HSCAN NOVALUES."""
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=1) as store:
        store.write(0, IDS, ROWS)
    with client_of(redis_server.url) as client:
        parts = list(scanned(client, bucket_key(namespace, 0), len(IDS), 5.0, count=7, no_values=False))
    assert len(parts) > 10
    assert (np.unique(np.concatenate(parts)["id"]) == IDS).all()


def test_a_server_that_is_back_without_its_data(redis_server: EmbeddedServer, namespace: str) -> None:
    """Refused unless the caller reloads its rows; then only its record is created again."""
    urls = [f"{redis_server.url}?db={number}" for number in (6, 7, 8)]
    for lost in range(3):
        name = f"{namespace}-{lost}"
        with RedisStore(",".join(urls), schema=SCHEMA, namespace=name) as store:
            assert store.claim()
            store.write(0, IDS, ROWS)
            with client_of(urls[lost]) as client:
                client.delete(*client.keys(f"{name}*"))
                refused(",".join(urls), urls[lost].split("=")[-1], "lost its data", namespace=name)
                assert store.check(reloads=True) is True
                assert client.keys(f"{name}*") == []
                assert store.claim(reloads=True) is False
                assert client.keys(f"{name}*") == [meta_key(name)]
            assert store.check() is True
            found = store.read(0, IDS).found
            assert found.any()
            assert not found.all()


def test_a_reload_does_not_accept_rows_of_another_job(redis_server: EmbeddedServer, namespace: str) -> None:
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace) as store:
        store.write(0, IDS, ROWS)
        for call in (store.check, store.claim):
            with pytest.raises(InputError, match="holds rows but no schema record"):
                call(reloads=True)
        assert store.ledger().num_buckets == 64
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=f"{namespace}-new") as store:
        assert store.check(reloads=True) is False
        assert store.claim(reloads=True) is True
