from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from bagpipe.errors import InputError
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.open import SCHEMES, open_store
from bagpipe.store.redis.store import RedisStore
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=2),), optimizer="sgd")


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://", MemoryStore),
        ("memory://a-name", MemoryStore),
        ("redis://host:1/2", RedisStore),
        ("rediss://u:p@host", RedisStore),
        ("unix:///tmp/s.sock?db=1", RedisStore),
        ("redis://a,unix:///b", RedisStore),
        ("redis+cluster://a:1,b:2", RedisStore),
        ("rediss+cluster://u:p@a:1", RedisStore),
    ],
)
def test_the_scheme_names_the_store(url: str, kind: type) -> None:
    assert isinstance(open_store(url, namespace="job", schema=SCHEMA), kind)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:6379",
        "http://host",
        "redis-cluster://host",
        "redis://a,http://b",
        "Redis://host",
        "/tmp/s.sock",
        "://",
    ],
)
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(InputError) as caught:
        open_store(url, namespace="job", schema=SCHEMA)
    assert all(f"{scheme}://" in str(caught.value) for scheme in SCHEMES)
    assert "\n" not in str(caught.value)


def test_a_mistyped_url_does_not_show_its_password() -> None:
    with pytest.raises(InputError) as caught:
        open_store("redsi://u:secret@host", namespace="job", schema=SCHEMA)
    assert "secret" not in str(caught.value)
    assert "'redsi://'" in str(caught.value)


def test_kinds_do_not_mix() -> None:
    with pytest.raises(InputError, match="must name one kind of store, got memory://"):
        open_store("memory://a,redis://b", namespace="job", schema=SCHEMA)


@pytest.mark.parametrize("url", ["memory://a/b", "memory://a b", "memory://a,memory://b"])
def test_a_bad_memory_name(url: str) -> None:
    with pytest.raises(InputError, match=r"store\.url"):
        open_store(url, namespace="job", schema=SCHEMA)


def test_settings_are_passed_on() -> None:
    with pytest.raises(InputError, match=r"store\.buckets"):
        open_store("memory://", namespace="job", schema=SCHEMA, buckets=3)
    with pytest.raises(InputError, match=r"store\.namespace"):
        open_store("redis://a", namespace="", schema=SCHEMA)


def test_durability_is_passed_on() -> None:
    assert isinstance(open_store("redis://a", namespace="job", schema=SCHEMA, durability="always"), RedisStore)
    with pytest.raises(
        InputError, match=r"store\.durability is everysec, but memory:// keeps rows in this process only"
    ):
        open_store("memory://", namespace="job", schema=SCHEMA, durability="everysec")


def test_a_memory_store_is_found_again_by_name(namespace: str) -> None:
    ids = np.arange(3, dtype=np.int64)
    with open_store("memory://again", namespace=namespace, schema=SCHEMA) as store:
        store.write(0, ids, np.ones((3, 2), np.float32))
    with open_store("memory://again", namespace=namespace, schema=SCHEMA) as store:
        assert store.read(0, ids).found.all()
    with open_store("memory://", namespace=namespace, schema=SCHEMA) as store:
        assert not store.read(0, ids).found.any()


def test_a_memory_store_needs_neither_redis_nor_torch() -> None:
    program = (
        "import sys; from bagpipe.store.open import open_store; from bagpipe.types.schema import *\n"
        "s = RowSchema(tables=(RowTable(name='t', dim=2),), optimizer='sgd')\n"
        "open_store('memory://', namespace='job', schema=s)\n"
        "assert not {'redis', 'torch', 'valkey'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
