"""`RowClient` over a real store: the rows of `bagpipe.store`, a user who may only read, servers that go and come."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.config.sections import StoreConfig
from bagpipe.errors import InputError, StoreError
from bagpipe.serving import RowClient, live_rows
from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import meta_key
from bagpipe.store.redis.ledger import RedisLedger
from bagpipe.store.redis.server_checks import READING_COMMANDS
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import take_over
from bagpipe.train_pipeline.row_sources import NamespaceRows
from tests.docs.pages import ROOT
from tests.serving.exports import SCHEMA, exported, source_of, write_rows
from tests.serving.test_row_client import IDS, expected_of
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes
from trainer.row_report import store_rows

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


#: What a namespace can lose while its schema record stays: patterns of the keys of bucket 0, or of all.
_LOSSES = {
    "everything": "{*",
    "all rows": "{?}",
    "the rows of a bucket": "{3}",
    "the job record": "{0}:job",
    "the owners": "{?}:owner",
    "the sets of logs": "{?}:logs",
    "the logs of a bucket": "{5}:log:*",
}


def ended_job(url: str, namespace: str, *, has_rows: bool = True, ends: bool = True) -> None:
    """The rows of a job in 8 buckets, beside the records that a job leaves."""
    with RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=8) as store:
        store.claim()
        fence = take_over(store)
        record = JobRecord(job="a" * 32, has_checkpoints=False)
        if has_rows:
            write_rows(store, np.random.default_rng(2), 40)
        with RedisLedger(store._namespace, token=fence.token) as ledger:
            num_rows = sum(state.num_rows for state in ledger.state())
            ledger.record_job(dataclasses.replace(record, state="finished", num_rows=num_rows) if ends else record)


def lose(client: redis.Redis, namespace: str, pattern: str) -> None:
    keys = list(client.scan_iter(f"{namespace}:{pattern}"))
    assert keys
    client.delete(*keys)


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_namespace_that_has_lost_its_rows_is_not_read(
    redis_servers: tuple[str, ...], namespace: str, loss: str
) -> None:
    """Otherwise a client would serve initial vectors for every id."""
    ended_job(redis_servers[0], namespace)
    with client_of(redis_servers[0]) as client:
        with RowClient.connect(redis_servers[0], namespace=namespace) as rows:
            rows.read(IDS)
            lose(client, namespace, _LOSSES[loss])
            with pytest.raises(StoreError, match=r"has lost its data: [^\n]*$"):
                rows.ping()
            if loss in ("everything", "all rows"):  # seen at once over the open connection
                with pytest.raises(StoreError, match=r"has lost its data: [^\n]*$"):
                    rows.read(IDS)
            rows.close()
            with pytest.raises(StoreError, match=r"has lost its data: [^\n]*$"):
                rows.read(IDS)  # connects anew
        with pytest.raises(StoreError, match=r"has lost its data: [^\n]*$"):
            RowClient.connect(redis_servers[0], namespace=namespace)
        assert client.exists(meta_key(namespace))


def test_rows_that_vanish_under_an_open_connection_are_missed(
    redis_cluster: ClusterNodes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if a read finds nothing, else with the next check."""
    ended_job(redis_cluster.url, namespace)
    with RowClient.connect(redis_cluster.url, namespace=namespace) as rows:
        rows.read(IDS)
        rows.read({"user": np.array([10**12])})  # never trained
        for node in redis_cluster.masters[1:]:  # the schema record may lie on the first
            for key in node.client.scan_iter(f"{namespace}:{{*"):
                node.client.delete(key)
        monkeypatch.setattr(live_rows, "_CHECK_INTERVAL_S", 0.0)
        with pytest.raises(StoreError, match="has lost its data"):
            rows.read({"user": np.arange(-60, 60)})


@pytest.mark.parametrize("ends", [False, True])
def test_a_namespace_without_rows_yet_has_initial_vectors(
    redis_server: EmbeddedServer, namespace: str, ends: bool
) -> None:
    ended_job(redis_server.url, namespace, has_rows=False, ends=ends)
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=8) as store:
        expected = {name: expected_of(store, name, ids) for name, ids in IDS.items()}
    with RowClient.connect(redis_server.url, namespace=namespace) as rows:
        rows.ping()
        for name, values in rows.read(IDS).items():
            np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize("loss", ["everything", "all rows", "the job record"])
def test_no_other_reader_takes_what_is_left(redis_server: EmbeddedServer, namespace: str, loss: str) -> None:
    ended_job(redis_server.url, namespace)
    with client_of(redis_server.url) as client:
        lose(client, namespace, _LOSSES[loss])
    config = StoreConfig(namespace=namespace)
    with pytest.raises(StoreError, match="has lost its data"):
        store_rows(redis_server.url, config, None)
    other = NamespaceRows(
        lambda: RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace, num_buckets=8), "namespace 'other'"
    )
    with pytest.raises(StoreError, match="namespace 'other' has lost its data"):
        list(other.requests())


def reader_rules() -> list[str]:
    """The rules of the reader in docs/serving.md, without its password."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    found = re.search(r"ACL SETUSER serving on >secret (.*)$", page, re.MULTILINE)
    assert found
    return found[1].split()


def set_reader(client: redis.Redis, *rules: str) -> None:
    client.execute_command("ACL", "SETUSER", "serving", "reset", "on", ">secret", *rules)


def as_reader(url: str) -> str:
    return url.replace("://", "://serving:secret@", 1)


def test_the_documented_user_can_only_read(own_server: EmbeddedServer) -> None:
    """The rules of docs/serving.md are enough, and what is called is no more than they allow."""
    ended_job(own_server.url, "bagpipe")
    with RedisStore(own_server.url, schema=SCHEMA, namespace="bagpipe", num_buckets=8) as store:
        expected = {name: expected_of(store, name, ids) for name, ids in IDS.items()}
    with client_of(own_server.url) as client:
        set_reader(client, *reader_rules())
        client.config_resetstat()
        with RowClient.connect(as_reader(own_server.url), namespace="bagpipe") as rows:
            np.testing.assert_array_equal(rows.read(IDS)["user"], expected["user"])
            rows.ping()
        called = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert called - {"config|resetstat", "auth", "client|setinfo"} == set(READING_COMMANDS)
    assert [f"+{name}" for name in READING_COMMANDS] == [rule for rule in reader_rules() if rule.startswith("+")]


def test_the_documented_user_reads_a_cluster(redis_cluster: ClusterNodes, namespace: str) -> None:
    ended_job(redis_cluster.url, namespace)
    rules = [rule.replace("bagpipe", namespace) for rule in reader_rules()]
    try:
        for node in redis_cluster.nodes:
            set_reader(node.client, *rules, "+asking", "+cluster|slots")
        with RowClient.connect(as_reader(redis_cluster.url), namespace=namespace) as rows:
            assert rows.read(IDS)
            rows.ping()
        for lacks in ("hlen", "cluster|slots"):
            for node in redis_cluster.nodes:
                set_reader(node.client, *rules, "+asking", "+cluster|slots", f"-{lacks}")
            with pytest.raises(InputError) as caught:
                RowClient.connect(as_reader(redis_cluster.url), namespace=namespace)
            assert f"a reader needs {' '.join([*rules, '+asking +cluster|slots'])}" in str(caught.value)
    finally:
        for node in redis_cluster.nodes:
            node.client.acl_deluser("serving")


@pytest.mark.parametrize("change", [*(f"-{name}" for name in READING_COMMANDS), "resetkeys"])
def test_a_reader_without_a_right_is_told_all_that_it_needs(own_server: EmbeddedServer, change: str) -> None:
    """In one line: whoever adds the rights one by one would be refused again and again."""
    ended_job(own_server.url, "bagpipe")
    with client_of(own_server.url) as client:
        set_reader(client, *reader_rules(), change)
        with pytest.raises(InputError, match=r"^[^\n]*$") as caught:
            RowClient.connect(as_reader(own_server.url), namespace="bagpipe")
        assert f"a reader needs {' '.join(reader_rules())} (see docs/serving.md)" in str(caught.value)
        set_reader(client, *reader_rules())
        with RowClient.connect(as_reader(own_server.url), namespace="bagpipe") as rows:
            set_reader(client, *reader_rules(), change)
            rows.close()
            with pytest.raises(StoreError, match=r"^[^\n]*a reader needs "):
                rows.read(IDS)


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
