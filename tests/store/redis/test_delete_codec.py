"""Rows deleted from real servers: any number of them, in any order with writes."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import CorruptRowError, StoreError
from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.keys import FIELD_DTYPE, bucket_key
from bagpipe.store.redis.delete_codec import batches_of
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.fence_jobs import take_over, touched_ids
from bagpipe.types.schema import RowSchema, RowTable
from tests.effort import at_most
from tests.store.clients import client_of

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=1), RowTable(name="item", dim=2)), optimizer="sgd")
IDS = np.arange(50, dtype=np.int64)


def opened(url: str, namespace: str, num_buckets: int = 2) -> RedisStore:
    return RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=num_buckets)


@given(st.lists(st.integers(0, 12), max_size=5), st.integers(1, 6))
def test_batches_keep_the_order_and_are_full(lengths: list[int], max_rows: int) -> None:
    starts = np.cumsum([0, *lengths])
    deletions = [(table, np.arange(starts[table], starts[table + 1])) for table in range(len(lengths))]
    batches = list(batches_of(deletions, max_rows))
    assert [sum(len(ids) for _, ids in batch) for batch in batches[:-1]] == [max_rows] * (len(batches) - 1)
    joined = [(table, int(row_id)) for batch in batches for table, ids in batch for row_id in ids]
    assert joined == [(table, int(row_id)) for table, ids in deletions for row_id in ids]
    assert all(len(ids) for batch in batches for _, ids in batch)


CHANGES = st.lists(
    st.tuples(st.booleans(), st.integers(0, 1), st.lists(st.integers(0, 12), min_size=1, max_size=9, unique=True)),
    max_size=10,
)


@pytest.mark.redis
@at_most(20)
@given(changes=CHANGES, is_fenced=st.booleans(), num_buckets=st.sampled_from([1, 4]))
def test_it_behaves_like_a_dict(redis_server: EmbeddedServer, changes, is_fenced: bool, num_buckets: int) -> None:
    expected: dict[tuple[int, int], float] = {}
    with opened(redis_server.url, f"model-{uuid.uuid4().hex}", num_buckets) as store:
        if is_fenced:
            take_over(store)
        num_deleted = 0
        for number, (is_deletion, table, numbers) in enumerate(changes):
            ids, rows = np.array(numbers, np.int64), [(table, row_id) for row_id in numbers]
            if is_deletion:
                store.delete_many([DeleteRequest(table, ids)])
                num_deleted += sum(row in expected for row in rows)
                expected = {row: value for row, value in expected.items() if row not in rows}
            else:
                values = np.full((len(ids), table + 1), number, np.float32)
                store.write_many([WriteRequest(table, ids, values, store.read(table, ids).checks)])
                expected |= dict.fromkeys(rows, float(number))
        found = store.read_many([(table, np.arange(13)) for table in (0, 1)])
        for table, result in enumerate(found):
            assert result.found.tolist() == [(table, row_id) in expected for row_id in range(13)]
            assert result.rows[:, 0].tolist() == [expected.get((table, row_id), 0.0) for row_id in range(13)]
        assert store.statistics().rows_deleted == num_deleted
        assert store.sum_changes().to_list() == stored_sums(store).to_list()


@pytest.mark.redis
@pytest.mark.parametrize("is_fenced", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_buckets"),
    [
        (30_000, 1),  # several commands in one bucket
        (3_000, 4096),  # more commands than fit in one request, about one row each
    ],
)
def test_deletions_are_cut_into_commands_and_frames(
    redis_server: EmbeddedServer, namespace: str, num_rows: int, num_buckets: int, is_fenced: bool
) -> None:
    ids = np.random.default_rng(0).permutation(num_rows).astype(np.int64)
    with opened(redis_server.url, namespace, num_buckets) as store:
        if is_fenced:
            take_over(store)
        rows = np.ones((num_rows, 2), np.float32)
        store.write_many([WriteRequest(1, ids, rows, np.zeros(num_rows, np.uint64))])
        store.delete_many([DeleteRequest(1, ids[: num_rows - 5])])
        assert (store.ids(1) == np.sort(ids[-5:])).all()
        assert store.sum_changes().to_list() == stored_sums(store).to_list()
        if is_fenced and num_buckets == 1:
            assert store.rotate().tolist() == [-(-30_000 // 8_192) + -(-29_995 // 5_461)]
            with store.ledger() as ledger:
                assert (touched_ids(ledger, 1) == np.sort(ids)).all()


@pytest.mark.redis
def test_a_damaged_row_is_not_deleted(redis_server: EmbeddedServer, namespace: str) -> None:
    """Its word is unknown, so the sums could not be kept."""
    field = np.array([(0, 7)], FIELD_DTYPE).tobytes()
    with client_of(redis_server.url) as client, opened(redis_server.url, namespace, 1) as store:
        store.write(0, IDS, np.ones((50, 1), np.float32))
        value = client.hget(bucket_key(namespace, 0), field)
        client.hset(bucket_key(namespace, 0), field, bytes([value[0] ^ 1]) + value[1:])
        with pytest.raises(CorruptRowError, match=r"table 'user' id 7 .bucket 0. came back damaged"):
            store.delete_many([DeleteRequest(0, IDS)])
        assert (store.ids(0) == IDS).all()
        client.hset(bucket_key(namespace, 0), field, value)
        store.delete_many([DeleteRequest(0, IDS)])
        assert len(store.ids(0)) == 0


@pytest.mark.redis
def test_a_bucket_of_another_type(redis_server: EmbeddedServer, namespace: str) -> None:
    with client_of(redis_server.url) as client:
        client.set(bucket_key(namespace, 0), "not a hash")
    with opened(redis_server.url, namespace, 1) as store, pytest.raises(StoreError, match="WRONGTYPE"):
        store.delete_many([DeleteRequest(0, IDS)])
    with pytest.raises(StoreError, match="not open"):
        store.delete_many([DeleteRequest(0, IDS)])


@pytest.mark.redis
def test_fields_alone_are_sent(redis_server: EmbeddedServer, namespace: str) -> None:
    ids = np.arange(5_000, dtype=np.int64)
    with client_of(redis_server.url) as client, opened(redis_server.url, namespace) as store:
        store.write(0, ids, np.ones((5_000, 1), np.float32))
        before = store.statistics().bytes_sent
        client.config_resetstat()
        store.delete_many([DeleteRequest(0, ids)])
        assert store.statistics().bytes_sent - before < 2 * 20 * len(ids), "fields of 19 bytes, to read and to delete"
        commands: dict[str, dict[str, int]] = client.info("commandstats")
        assert commands["cmdstat_hdel"]["calls"] == commands["cmdstat_hmget"]["calls"] == 2
