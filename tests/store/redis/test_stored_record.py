"""The schema record of a namespace whose schema the reader does not know."""

from __future__ import annotations

import dataclasses

import pytest

from bagpipe.errors import InputError
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.redis.stored_record import backends_of, stored_record
from bagpipe.store.server.embedded import EmbeddedServer
from tests.serving.exports import SCHEMA

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]


def test_it_is_that_of_the_job(redis_servers: tuple[str, ...], namespace: str) -> None:
    url = ",".join(redis_servers)
    with RedisStore(url, schema=SCHEMA, namespace=namespace, num_buckets=16) as store:
        store.claim()
    found = stored_record(backends_of(url), namespace, timeout_s=10.0)
    assert (found.schema, found.num_buckets, found.num_servers, found.server) == (SCHEMA, 16, 3, 0)
    turned = ",".join(reversed(redis_servers))
    with pytest.raises(InputError, match="was made with server position '2', this job has '0'"):
        stored_record(backends_of(turned), namespace, timeout_s=10.0)
    other = dataclasses.replace(SCHEMA, seed=SCHEMA.seed + 1)
    with pytest.raises(InputError, match=f"has rows of another model: expected seed {other.seed}, got {SCHEMA.seed}"):
        stored_record(backends_of(url), namespace, timeout_s=10.0, expected=other)


def test_a_namespace_without_one_is_refused(redis_server: EmbeddedServer, namespace: str) -> None:
    with pytest.raises(InputError, match="has no schema record: expected the namespace of a job"):
        stored_record(backends_of(redis_server.url), namespace, timeout_s=10.0)
