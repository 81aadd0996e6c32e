from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError, StoreError
from bagpipe.store.keys import (
    FIELD_DTYPE,
    NUM_SLOTS,
    bucket_key,
    bucket_of,
    check_layout,
    decode_fields,
    key_slot,
    meta_key,
)
from tests.store.nodes import ClusterNodes

# Part of the stored format: a change orphans every stored row.
GOLDEN_BUCKETS = [
    # table, id, of 64, of 65,536
    (0, 0, 56, 57_888),
    (0, 1, 36, 37_130),
    (0, -1, 57, 58_585),
    (1, 0, 27, 28_280),
    (7, 2**63 - 1, 35, 35_855),
    (25, -(2**63), 50, 51_369),
    (3, 123_456_789, 33, 34_078),
]


@pytest.mark.parametrize(("table", "row_id", "of_64", "of_65536"), GOLDEN_BUCKETS)
def test_buckets_never_change(table: int, row_id: int, of_64: int, of_65536: int) -> None:
    tables, ids = np.array([table], np.uint32), np.array([row_id], np.int64)
    assert bucket_of(tables, ids, 1 << 16).tolist() == [of_65536]
    assert bucket_of(tables, ids, 64).tolist() == [of_64]
    assert bucket_of(tables, ids, 1).tolist() == [0]


def test_fewer_buckets_are_the_high_bits_of_more() -> None:
    ids = np.arange(1000, dtype=np.int64)
    tables = np.zeros(1000, np.uint32)
    assert (bucket_of(tables, ids, 1 << 16) >> 10 == bucket_of(tables, ids, 64)).all()


@pytest.mark.parametrize("step", [1, 64, 1 << 20, 1 << 40])
def test_regular_ids_spread_evenly(step: int) -> None:
    ids = np.arange(64_000, dtype=np.int64) * step
    counts = np.bincount(bucket_of(np.zeros(64_000, np.uint32), ids, 64), minlength=64)
    # 1,000 expected in each, standard deviation 31.
    assert counts.min() > 850
    assert counts.max() < 1150


def test_equal_ids_of_two_tables_have_different_buckets() -> None:
    ids = np.arange(6400, dtype=np.int64)
    first, second = (bucket_of(np.full(6400, table, np.uint32), ids, 64) for table in (0, 1))
    assert np.count_nonzero(first == second) < 200  # 100 expected by chance


def test_field_is_twelve_bytes_that_read_as_numbers() -> None:
    fields = np.array([(3, 258), (0, -1)], FIELD_DTYPE)
    assert fields[0].tobytes().hex(" ", 4) == "00000003 00000000 00000102"
    assert fields[1].tobytes().hex(" ", 4) == "00000000 ffffffff ffffffff"
    assert (decode_fields([field.tobytes() for field in fields]) == fields).all()
    assert len(decode_fields([])) == 0


def test_a_strange_field_is_refused() -> None:
    with pytest.raises(StoreError, match="field of 3 bytes, expected 12"):
        decode_fields([b"x" * 12, b"abc"])


def test_keys() -> None:
    assert bucket_key("job", 7) == b"job:{7}"
    assert meta_key("job") == b"job:meta"


@pytest.mark.parametrize("namespace", ["", "a b", "a{1}", "x\n", "é", "a" * 201])
def test_a_bad_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(InputError, match=r"store\.namespace"):
        check_layout(namespace, 64)


@pytest.mark.parametrize("num_buckets", [0, -1, 3, 1 << 17])
def test_a_bad_number_of_buckets_is_refused(num_buckets: int) -> None:
    with pytest.raises(InputError, match=rf"power of two .* got {num_buckets}"):
        check_layout("job", num_buckets)


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        (b"job:{7}", b"7"),
        (b"{7}", b"7"),
        (b"a{7}{8}b", b"7"),
        (b"a{{7}}b", b"{7"),
        (b"job:{}", b"job:{}"),
        (b"job:{7", b"job:{7"),
        (b"job:meta", b"job:meta"),
    ],
)
def test_a_slot_is_that_of_the_tag(key: bytes, tag: bytes) -> None:
    assert key_slot(key) == key_slot(tag)


def test_the_check_value_of_the_cluster_specification() -> None:
    assert key_slot(b"123456789") == 0x31C3 % NUM_SLOTS


@pytest.mark.redis
@given(st.lists(st.binary(max_size=20) | st.integers(0, 65_535).map(lambda bucket: bucket_key("job", bucket))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_slots_equal_a_clusters(redis_cluster: ClusterNodes, keys: list[bytes]) -> None:
    with redis_cluster.nodes[0].client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.execute_command("CLUSTER", "KEYSLOT", key)
        assert [key_slot(key) for key in keys] == pipeline.execute()


@pytest.mark.redis
def test_every_bucket_has_the_slot_that_a_cluster_says(redis_cluster: ClusterNodes) -> None:
    keys = [bucket_key("job", bucket) for bucket in range(4096)]
    with redis_cluster.nodes[0].client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.execute_command("CLUSTER", "KEYSLOT", key)
        assert [key_slot(key) for key in keys] == pipeline.execute()
