"""The records of a namespace, read by a program that does not know its schema and may only read.

record of every server ──compare──> one schema, number of buckets, every server in its place
owners, logs, numbers of rows, job record ──check_present──> StoreError if any of them are gone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import (
    BucketState,
    Fence,
    LogState,
    fenced_log_key,
    job_key,
    log_key,
    logs_key,
    owner_key,
    parse_log_name,
)
from bagpipe.store.fencing.presence import check_present, missing_part
from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import bucket_key, meta_key
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.namespace import Backend, Session
from bagpipe.store.redis.reply_forms import COUNT, NAMES, TEXT_OR_NONE
from bagpipe.store.redis.routing import servers_of_buckets
from bagpipe.store.redis.servers import KeyCommand
from bagpipe.store.redis.urls import is_cluster_url, parse_cluster_url, parse_urls
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.types.schema import RowSchema
from bagpipe.util.documents import parse_json

__all__ = ["StoredNamespace", "backends_of", "stored_record"]


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


class StoredNamespace:
    """What lies beside the rows of a namespace, read by GET, HLEN, LLEN, SMEMBERS and HGETALL.

    Args:
        sessions: of every server in order, or of the cluster; opened by the caller.
        name: of the namespace.
        num_buckets: of the namespace.
    """

    def __init__(self, sessions: Sequence[Session], name: str, num_buckets: int) -> None:
        self._sessions = sessions
        self._label = f"namespace {name!r}"
        self._keys = [bucket_key(name, bucket) for bucket in range(num_buckets)]
        self._servers = servers_of_buckets(num_buckets, len(sessions)).tolist()

    @staticmethod
    @contextmanager
    def opened(backends: Sequence[Backend], name: str, num_buckets: int, timeout_s: float) -> Iterator[StoredNamespace]:
        """A namespace with sessions of its own."""
        with ExitStack() as stack:
            sessions = [stack.enter_context(backend.session(timeout_s)) for backend in backends]
            yield StoredNamespace(sessions, name, num_buckets)

    def num_rows(self, buckets: Sequence[int]) -> list[int]:
        """Rows of buckets. Raises InputError if a server fails or refuses."""
        return self._run([(bucket, KeyCommand(key, ("HLEN", key), COUNT)) for bucket, key in self._named(buckets)])

    def check(self) -> None:
        """Check that nothing which the namespace's records tell of is gone.

        Raises:
            StoreError: something is; names it.
            InputError: a server fails or refuses.
        """
        # Logs of a running job come and go between two commands: only what is gone twice is lost.
        if missing := missing_part(*self._state()):
            states, record = self._state()
            if missing_part(states, record) == missing:
                check_present(states, record, namespace=self._label)

    def _state(self) -> tuple[list[BucketState], JobRecord | None]:
        every = self._named(range(len(self._keys)))
        owners = self._run([(b, KeyCommand(key, ("GET", owner_key(key)), TEXT_OR_NONE)) for b, key in every])
        names = self._run([(b, KeyCommand(key, ("SMEMBERS", logs_key(key)), NAMES)) for b, key in every])
        logs = [(bucket, self._log_of(name)) for bucket, found in enumerate(names) for name in sorted(found)]
        lengths = self._run(
            [
                (bucket, KeyCommand(key, ("LLEN", of(key, fence)), COUNT))
                for bucket, fence in logs
                for key in (self._keys[bucket],)
                for of in (log_key, fenced_log_key)
            ]
        )
        by_bucket: dict[int, list[LogState]] = {}
        for (bucket, fence), own, fenced in zip(logs, lengths[::2], lengths[1::2], strict=True):
            log = LogState(token=fence.token, epoch=fence.epoch, writer=fence.writer, num_groups=max(own, fenced) - 1)
            by_bucket.setdefault(bucket, []).append(log)
        num_rows = self.num_rows(range(len(self._keys)))  # after the logs: rows are logged before they are there
        states = [
            BucketState(
                owner=(owner or b"").decode(errors="replace"), logs=tuple(by_bucket.get(bucket, ())), num_rows=count
            )
            for bucket, (owner, count) in enumerate(zip(owners, num_rows, strict=True))
        ]
        key = self._keys[0]
        record = self._sessions[0].run(key, lambda client: client.hgetall(job_key(key)))
        fields = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in record.items()}
        return states, JobRecord.from_fields(fields)

    def _named(self, buckets: Sequence[int]) -> list[tuple[int, bytes]]:
        return [(bucket, self._keys[bucket]) for bucket in buckets]

    def _run(self, commands: Sequence[tuple[int, KeyCommand]]) -> list[Any]:
        """Replies to commands on buckets, in order."""
        answers: list[Any] = [None] * len(commands)
        for server, session in enumerate(self._sessions):
            share = [number for number, (bucket, _) in enumerate(commands) if self._servers[bucket] == server]
            found = session.run_all([commands[number][1] for number in share])
            for number, answer in zip(share, found, strict=True):
                answers[number] = answer
        return answers

    def _log_of(self, name: bytes) -> Fence:
        try:
            return parse_log_name(name)
        except ValueError:
            raise StoreError(f"{self._label}: a bucket has a log named {name[:60]!r}") from None
