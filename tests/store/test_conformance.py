"""Every store passes the same checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from bagpipe.store.interface import Store
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.process.store import REGION_BYTES, ProcessStore
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.slow_store import SlowStore
from bagpipe.testing.store_conformance import CHECKS, MakeStore
from bagpipe.types.schema import RowSchema
from tests.store.nodes import ClusterNodes
from tests.store.process.fork_server import ForkServer

pytestmark = pytest.mark.usefixtures("no_leaks")

checks = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
Check = Callable[[MakeStore], None]


def make_memory(schema: RowSchema, namespace: str) -> Store:
    return MemoryStore(schema, name="conformance", namespace=namespace)


def make_redis(urls: str, num_buckets: int, schema: RowSchema, namespace: str) -> Store:
    return RedisStore(urls, schema=schema, namespace=namespace, num_buckets=num_buckets)


@checks
def test_memory(check: Check) -> None:
    check(make_memory)


@pytest.fixture(scope="module")
def children() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@checks
def test_slow_store(check: Check) -> None:
    check(lambda schema, namespace: SlowStore(make_memory(schema, namespace)))


@pytest.mark.redis
@pytest.mark.parametrize("num_buckets", [1, 64])
@checks
def test_one_server(check: Check, num_buckets: int, redis_server: EmbeddedServer) -> None:
    check(functools.partial(make_redis, redis_server.url, num_buckets))


@pytest.mark.redis
@checks
def test_three_servers(check: Check, redis_servers: tuple[str, ...]) -> None:
    check(functools.partial(make_redis, ",".join(redis_servers), 16))


@pytest.mark.redis
@pytest.mark.parametrize("num_buckets", [1, 64])
@checks
def test_cluster(check: Check, num_buckets: int, redis_cluster: ClusterNodes) -> None:
    check(functools.partial(make_redis, redis_cluster.url, num_buckets))


@pytest.mark.redis
@pytest.mark.parametrize("region_bytes", [16 << 10, REGION_BYTES])
@checks
def test_process(check: Check, region_bytes: int, redis_servers: tuple[str, ...], children: ForkServer) -> None:
    def make(schema: RowSchema, namespace: str) -> Store:
        return ProcessStore(
            ",".join(redis_servers),
            schema=schema,
            namespace=namespace,
            num_buckets=16,
            region_bytes=region_bytes,
            start=children.start,
        )

    check(make)
