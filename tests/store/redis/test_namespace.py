"""Schema records, keys, and the agreement of several servers (here: databases of one server)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.adoption import adopt
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.stored_rows import StoredRows
from bagpipe.config.sections import StoreConfig
from bagpipe.errors import InputError
from bagpipe.jobs.claim import Claim
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.resume_point import ResumePoint
from bagpipe.store.audit import every_row, stored_sums
from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import FIELD_DTYPE, bucket_key, meta_key
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import new_token
from bagpipe.training.digest import embedding_digest
from bagpipe.types.schema import RowSchema, RowTable
from tests.checkpoint.samples import empty_manifest
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


def calls(url: str) -> dict[str, int]:
    """Calls of each command so far."""
    with client_of(url) as client:
        statistics = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(values["calls"]) for name, values in statistics.items()}


@pytest.mark.parametrize("num_tables", [1, 26, 3_000])
def test_reading_every_row_takes_no_commands_for_each_table(
    redis_server: EmbeddedServer, namespace: str, num_tables: int
) -> None:
    schema = RowSchema(tables=tuple(RowTable(name=f"t{n}", dim=1) for n in range(num_tables)), optimizer="sgd")
    share = 6_000 // num_tables
    with RedisStore(redis_server.url, schema=schema, namespace=namespace, num_buckets=4) as store:
        store.claim()
        ids = np.arange(share, dtype=np.int64)
        rows = ids.astype(np.float32)[:, None]
        store.write_many([WriteRequest(table, ids, rows + table) for table in range(num_tables)])
        before = calls(redis_server.url)
        order = list(reversed(range(num_tables)))
        found = list(every_row(store, order))
        sent = {name: count - before.get(name, 0) for name, count in calls(redis_server.url).items()}
    assert [part.table for part in found] == order
    for table, row_ids, result in found:
        assert (row_ids == ids).all()
        assert (result.rows == rows + table).all()
    # Each bucket is asked for its size once to group the tables, if there are several, and once to bound the scan of
    # its names.
    sizes = 4 if num_tables == 1 else 8
    assert {name: sent[name] for name in ("hlen", "hscan", "hmget")} == {"hlen": sizes, "hscan": 4, "hmget": 4}


@pytest.mark.parametrize("num_tables", [1, 26, 3_000])
def test_whoever_needs_all_names_lists_them_once(
    redis_server: EmbeddedServer, namespace: str, num_tables: int, tmp_path: Path
) -> None:
    """The digest, the audit, exports, the adoption of rows, the check for lost rows and the report of a namespace."""
    schema = RowSchema(tables=tuple(RowTable(name=f"t{n}", dim=1) for n in range(num_tables)), optimizer="sgd")
    folder, token = CheckpointFolder(tmp_path), new_token(1)
    manifest = empty_manifest(folder.new_generation(), token, schema=schema)
    with RedisStore(redis_server.url, schema=schema, namespace=namespace, num_buckets=4) as store:
        store.claim()
        requests = [WriteRequest(n, IDS[:2], np.full((2, 1), n, np.float32)) for n in range(num_tables)]
        store.write_many(requests)
        claim = Claim(StoreConfig(), Ranks(), store, ResumePoint(token=token), rows=None, on_adopted=print)
        with store.ledger() as ledger:
            adopted: list[Checkpoint] = []
            stored = StoredRows(store)
            readers: dict[str, Callable[[], object]] = {
                "digest": lambda: embedding_digest(store),
                "audit": lambda: stored_sums(store),
                "stored rows": lambda: [stored.ids(table) for table in range(num_tables)],
                "adoption": lambda: adopted.append(
                    adopt(store, ledger, token=token, folder=folder, manifest=manifest, num_writers=1)
                ),
                "lost rows": lambda: claim.check_rows(adopted[0]),
                "numbers": store.num_rows,
            }
            for name, read in readers.items():
                before = calls(redis_server.url)
                read()
                sent = {command: count - before.get(command, 0) for command, count in calls(redis_server.url).items()}
                assert (name, sent["hscan"]) == (name, 4)
                assert sum(sent.values()) < 150, (name, sent)
    folder.release()


def test_ids_of_tables_are_listed_in_groups_that_fit_memory(
    redis_server: EmbeddedServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = RowSchema(tables=tuple(RowTable(name=f"t{n}", dim=1) for n in range(5)), optimizer="sgd")
    sizes = [30, 10, 0, 50, 20]
    with RedisStore(redis_server.url, schema=schema, namespace=namespace, num_buckets=4) as store:
        store.claim()
        ids = [np.arange(size, dtype=np.int64) - table for table, size in enumerate(sizes)]
        store.write_many([WriteRequest(t, ids[t], np.zeros((len(ids[t]), 1), np.float32)) for t in range(5)])
        monkeypatch.setattr("bagpipe.store.redis.namespace.HELD_ID_BYTES", 40 * 8)
        groups = [list(group) for group in store.ids_by_table([0, 1, 2, 3, 4])]
        assert groups == [[0, 1, 2], [3], [4]]  # a table that is too large is a group
        kept = StoredRows(store)
        for table in (3, 4, 0, 1, 2, 0):
            assert (kept.ids(table) == ids[table]).all()
            assert (store.ids(table) == ids[table]).all()
