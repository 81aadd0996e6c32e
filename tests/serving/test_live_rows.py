"""`RowClient` over a real store: the rows of `bagpipe.store`, a user who may only read, servers that go and come."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError, StoreError
from bagpipe.serving import RowClient
from bagpipe.store.keys import meta_key
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from tests.docs.pages import ROOT
from tests.serving.exports import SCHEMA, exported, source_of, write_rows
from tests.serving.test_row_client import IDS, expected_of
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "own") as server:
        yield server


def fill(url: str, namespace: str) -> dict[str, np.ndarray]:
    """Rows of a namespace. Returns the vectors of `IDS`."""
    with RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=8) as store:
        store.claim()
        write_rows(store, np.random.default_rng(2), 40)
        return {name: expected_of(store, name, ids) for name, ids in IDS.items()}


def test_vectors_are_the_rows_of_the_store_or_their_initial_values(
    redis_servers: tuple[str, ...], redis_cluster: ClusterNodes, namespace: str
) -> None:
    for url in (redis_servers[0], ",".join(redis_servers), redis_cluster.url):
        name = f"{namespace}-{url.count(',')}"
        expected = fill(url, name)
        with RowClient.connect(url, namespace=name, expected=SCHEMA) as client:
            client.ping()
            found = client.read(IDS)
        for table, values in expected.items():
            np.testing.assert_array_equal(found[table], values)


def test_files_and_store_give_equal_vectors(redis_server: EmbeddedServer, namespace: str, tmp_path: Path) -> None:
    fill(redis_server.url, namespace)
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=8) as store:
        folder = exported(source_of(store, 1), tmp_path / "out")
    with RowClient.connect(redis_server.url, namespace=namespace) as client:
        live = client.read(IDS)
    for name, values in RowClient.open(folder).read(IDS).items():
        np.testing.assert_array_equal(values, live[name])


def test_the_documented_user_can_only_read(own_server: EmbeddedServer) -> None:
    """The rules of docs/serving.md are enough, and what is called is no more than they allow."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    found = re.search(r"ACL SETUSER serving on >secret (.*)$", page, re.MULTILINE)
    assert found
    expected = fill(own_server.url, "bagpipe")
    with client_of(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "serving", "on", ">secret", *found[1].split())
        client.config_resetstat()
        url = own_server.url.replace("://", "://serving:secret@", 1)
        with RowClient.connect(url, namespace="bagpipe") as rows:
            np.testing.assert_array_equal(rows.read(IDS)["user"], expected["user"])
            rows.ping()
        called = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    allowed = {rule.removeprefix("+") for rule in found[1].split() if rule.startswith("+")}
    assert called - {"config|resetstat", "auth", "client|setinfo", "info"} == allowed - {"info"}
    assert not allowed & {"hset", "del", "eval", "set"}


def test_a_namespace_of_another_model_is_refused(redis_server: EmbeddedServer, namespace: str) -> None:
    with pytest.raises(InputError, match="has no schema record: expected the namespace of a job"):
        RowClient.connect(redis_server.url, namespace=namespace)
    fill(redis_server.url, namespace)
    others = {
        "expected seed 8, got 7": dataclasses.replace(SCHEMA, seed=8),
        r"expected tables \['user', 'item'\], got": dataclasses.replace(SCHEMA, tables=SCHEMA.tables[:2]),
        "expected table 'user' dim 9, got 3": dataclasses.replace(
            SCHEMA, tables=(dataclasses.replace(SCHEMA.tables[0], dim=9), *SCHEMA.tables[1:])
        ),
    }
    for words, schema in others.items():
        with pytest.raises(InputError, match=f"has rows of another model: {words}"):
            RowClient.connect(redis_server.url, namespace=namespace, expected=schema)
    with pytest.raises(InputError, match="timeout_s must be greater than 0"):
        RowClient.connect(redis_server.url, namespace=namespace, timeout_s=0)


def test_servers_that_disagree_are_refused(redis_servers: tuple[str, ...], namespace: str) -> None:
    """With another number of buckets rows are looked for in the wrong places, and taken for new ones."""
    url = ",".join(redis_servers)
    fill(url, namespace)
    with client_of(redis_servers[-1]) as client:
        client.hset(meta_key(namespace), "buckets", "16")
    with pytest.raises(InputError, match=r"expected store\.buckets '8', got '16'"):
        RowClient.connect(url, namespace=namespace)


def test_a_server_that_comes_back_is_read_again(tmp_path: Path) -> None:
    """A read fails in one line while there is no server; the next one connects anew, and finds what there is."""
    with EmbeddedServer(tmp_path / "server") as server:
        url = server.url
        expected = fill(url, "job")
        client = RowClient.connect(url, namespace="job", timeout_s=2)
        client.read(IDS)
    for call in (lambda: client.read(IDS), client.ping):
        with pytest.raises(StoreError, match=r"^[^\n]*$"):
            call()
    with EmbeddedServer(tmp_path / "server") as server:
        assert server.url == url
        with pytest.raises(StoreError, match="has no schema record"):
            client.read(IDS)
        fill(url, "job")
        np.testing.assert_array_equal(client.read(IDS)["city"], expected["city"])
    client.close()
