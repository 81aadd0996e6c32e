"""The schema record of a namespace, read by a program that does not know its schema.

record of every server ──compare──> one schema, number of buckets, every server in its place
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bagpipe.errors import InputError
from bagpipe.store.keys import meta_key
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.namespace import Backend
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.types.schema import RowSchema
from bagpipe.util.documents import parse_json

__all__ = ["backends_of", "stored_record"]


def backends_of(url: str) -> tuple[Backend, ...]:
    """The servers of a `store.url`, or its cluster.

    Raises:
        InputError: a malformed URL.
    """
    if is_cluster_url(url):
        return (Cluster(seeds=parse_cluster_url(url)),)
    return parse_urls(url)


def stored_record(
    backends: Sequence[Backend], namespace: str, *, timeout_s: float, expected: RowSchema | None = None
) -> SchemaRecord:
    """The record of a namespace, of server 0. Reads only.

    Args:
        backends: at least one.
        namespace: its name.
        timeout_s: deadline of each server.
        expected: schema that the namespace must have; None: any.

    Raises:
        InputError: a server cannot be reached, has no record, or one of another place or schema.
    """
    key = meta_key(namespace)
    record: SchemaRecord | None = None
    for number, backend in enumerate(backends):
        label = f"namespace {namespace!r} at {backend.endpoint}"
        with backend.session(timeout_s) as session:
            found = session.run(key, lambda client: client.hgetall(key))
        fields = {name.decode(): value.decode(errors="replace") for name, value in found.items()}
        if not fields:
            raise InputError(f"{label} has no schema record: expected the namespace of a job")
        if record is None:
            schema = _schema_of(fields, label) if expected is None else expected
            num_buckets = SchemaRecord.num_buckets_of(fields, label)
            record = SchemaRecord(schema=schema, num_buckets=num_buckets, num_servers=len(backends))
        own = replace(record, server=number)
        own.compare_place(fields, label)
        difference = own.difference(fields, label)
        if difference is not None:
            name, theirs, ours = difference
            raise InputError(f"{label} has rows of another model: expected {name} {ours!r}, got {theirs!r}")
    assert record is not None, "there is a server"
    return record


def _schema_of(fields: Mapping[str, str], label: str) -> RowSchema:
    try:
        return RowSchema.from_json(parse_json(fields.get("schema", "")))
    except (ValueError, InputError) as error:
        raise InputError(f"{label} has a schema record that this bagpipe does not read: {error}") from None
