"""The names of a bucket's rows, from servers with and without HSCAN NOVALUES."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.bucket_scan import scanned
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=64), RowTable(name="item", dim=4)), optimizer="sgd")
IDS = np.arange(200, dtype=np.int64)
ROWS = np.arange(200 * 64, dtype=np.float32).reshape(200, 64)


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
