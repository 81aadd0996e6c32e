"""A namespace's schema record on every server. Rule: compare everything before writing anything.

    check: record of server 0, 1, ... ──compare──> all match: True; none, and no rows: False; else refuse
    claim: check, then create the missing records, server 0 last: its record says that the namespace is claimed

Every server keeps its own record, with its position in the list: rows are spread by position, so a server that lost its
data, or a list in another order, would silently look like rows never written. A cluster counts as one server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.store.keys import bucket_key, decode_fields, meta_key
from bagpipe.store.redis.routing import servers_of_buckets
from bagpipe.store.redis.server_checks import (
    check_durability,
    check_eviction,
    check_rights,
    denied_commands,
    needs_appendfsync,
)
from bagpipe.store.redis.servers import KeyCommand
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.types.schema import RowSchema

__all__ = ["Backend", "Namespace"]

T = TypeVar("T")

#: Answers of a cluster's node that say nothing about the command.
_ELSEWHERE = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)

#: Fields asked for per step of a scan: a few milliseconds of the server's time.
_SCAN_FIELDS = 10_000

#: Buckets whose servers are asked what their user may do: enough to meet all nodes of a cluster, or most of them.
_ASKED_BUCKETS = 64


class Session(Protocol):
    """Commands on keys of one backend; errors come out as `InputError`."""

    def run(self, key: bytes, call: Callable[[redis.Redis], T]) -> T:
        """What `call` returns, given a client of the server that has `key`; it may be called more than once."""
        ...

    def run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Answers to commands that may be repeated, in order."""
        ...


class Backend(Protocol):
    """What keeps a record and the buckets that go with it: a server of a list, or a whole cluster."""

    @property
    def place(self) -> str:
        """For messages."""
        ...

    @property
    def database(self) -> int:
        """Number of the database at the server."""
        ...

    def infos(self, timeout_s: float, *, with_fsync: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
        """(place, INFO) of every server that takes rows; with its appendfsync if asked to."""
        ...

    def session(self, timeout_s: float) -> AbstractContextManager[Session]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What a backend has of a namespace: its record, None if it has none, and whether any row."""

    fields: dict[str, str] | None
    has_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Schema record and rows of one namespace.

    Attributes:
        name: prefix of all keys.
        schema: what the rows mean.
        num_buckets: bucket hashes, spread over the servers by number.
        backends: all servers, in order; or one cluster.
        timeout_s: deadline of one administrative command.
        durability: see `bagpipe.store.redis.server_checks`.
    """

    name: str
    schema: RowSchema
    num_buckets: int
    backends: tuple[Backend, ...]
    timeout_s: float
    durability: str = "memory"

    def check_servers(self) -> None:
        """Refuse a server that may drop rows, serves rows only partly, keeps them not well enough, or is named twice.

        Raises:
            InputError: names the server, what it is set to, and the fix.
        """
        seen: dict[object, str] = {}
        for backend in self.backends:
            for place, info in backend.infos(self.timeout_s, with_fsync=needs_appendfsync(self.durability)):
                check_eviction(place, info)
                check_durability(place, info, str(info.get("appendfsync", "")), self.durability)
                # A server named twice under two addresses; two databases of one server are two servers.
                identity = (info.get("run_id"), backend.database)
                if info.get("run_id") is not None and identity in seen:
                    raise InputError(f"store.url names one server twice: {seen[identity]} and {place}")
                seen[identity] = place

    def check(self, *, reloads: bool = False) -> bool:
        """See `Store.check`."""
        self.check_servers()
        claimed = self._is_claimed(self._stored_records(reloads=reloads))
        self._check_rights()
        return claimed

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`."""
        self.check_servers()
        records = self._stored_records(reloads=reloads)
        created = False
        # Server 0 last. Two jobs that claim at once both create or match the others; one of them creates this one.
        for number in reversed(range(len(self.backends))):
            if records[number].fields is None:
                created = self._create_record(number)
        return created and not self._is_claimed(records)

    @property
    def bucket_keys(self) -> list[bytes]:
        """Of all buckets, by number."""
        return [bucket_key(self.name, bucket) for bucket in range(self.num_buckets)]

    @property
    def backend_numbers(self) -> NDArray[np.int64]:
        """Which of the backends has each bucket, by number."""
        return servers_of_buckets(self.num_buckets, len(self.backends)).astype(np.int64)

    def place_of(self, number: int) -> str:
        """A backend, for messages."""
        return f"namespace {self.name!r} at {self.backends[number].place}"

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        parts = [np.empty(0, np.int64)]
        for number, backend in enumerate(self.backends):
            with backend.session(self.timeout_s) as session:
                for key in self._keys(number):
                    for pairs in session.run(key, partial(_scan, key=key)):
                        parts.append(pairs["id"][pairs["table"] == table].astype(np.int64))
        # A scan may show a field twice while the hash grows.
        return np.unique(np.concatenate(parts))

    def _keys(self, number: int) -> list[bytes]:
        """Keys of a backend's buckets."""
        buckets = np.flatnonzero(servers_of_buckets(self.num_buckets, len(self.backends)) == number)
        return [bucket_key(self.name, bucket) for bucket in buckets.tolist()]

    def _check_rights(self) -> None:
        """Ask every server, and every node of a cluster that has one of the first buckets."""
        for number, backend in enumerate(self.backends):
            keys = self._keys(number)[:_ASKED_BUCKETS]
            with backend.session(self.timeout_s) as session:
                denied = session.run_all([denied_commands(key) for key in keys])
            check_rights(backend.place, sorted({name for names in denied for name in names}))

    def _record(self, number: int) -> SchemaRecord:
        return SchemaRecord(
            schema=self.schema, num_buckets=self.num_buckets, num_servers=len(self.backends), server=number
        )

    def _is_claimed(self, records: Sequence[_Stored]) -> bool:
        """By another call, before. No record at server 0: that call was cut short, or the server lost it."""
        return records[0].fields is not None or any(record.has_rows for record in records)

    def _stored_records(self, *, reloads: bool) -> list[_Stored]:
        """Every server's record, compared with ours.

        Raises:
            InputError: a record differs, or rows exist without the record of their server, or (unless a reload makes
                up for it) without that of server 0.
        """
        records: list[_Stored] = []
        key = meta_key(self.name)
        for number, backend in enumerate(self.backends):
            with backend.session(self.timeout_s) as session:
                fields = _decode(session.run(key, lambda client: client.hgetall(key))) or None
                exist = session.run_all([KeyCommand(bucket, ("EXISTS", bucket)) for bucket in self._keys(number)])
            records.append(_Stored(fields=fields, has_rows=any(exist)))
        for number, record in enumerate(records):
            if record.fields is not None:
                self._record(number).compare(record.fields, self.place_of(number))
        claimed = records[0].fields is not None
        for number, record in enumerate(records):
            if record.fields is None and record.has_rows:
                raise InputError(
                    f"{self.place_of(number)} holds rows but no schema record; use another store.namespace"
                )
            if reloads:
                continue
            if record.fields is None and claimed:
                raise InputError(
                    f"{self.place_of(number)} has lost its data: server 0 has a schema record, this one has none"
                )
            if not claimed and record.has_rows:
                raise InputError(
                    f"{self.place_of(0)} has lost its data: server {number} holds rows, this one no record"
                )
        return records

    def _create_record(self, number: int) -> bool:
        """Write one server's record if it has none, else compare. True if this call wrote it. Atomic (WATCH, EXEC)."""
        key, record = meta_key(self.name), self._record(number)
        with self.backends[number].session(self.timeout_s) as session:
            stored = session.run(key, partial(_create, key=key, fields=record.to_fields()))
        if stored is None:
            return True
        record.compare(stored, self.place_of(number))
        return False


def _create(client: redis.Redis, *, key: bytes, fields: Mapping[str, str]) -> dict[str, str] | None:
    """Write a hash unless it exists; None if written, else what is there. Atomic."""
    with client.pipeline() as pipeline:
        pipeline.watch(key)
        stored = _decode(pipeline.hgetall(key))
        if stored:
            return stored
        pipeline.multi()
        pipeline.hset(key, mapping=fields)
        try:
            pipeline.execute()
        except redis.WatchError:  # another job wrote it between WATCH and EXEC
            return _decode(client.hgetall(key))
    return None


def _decode(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}


def _scan(client: redis.Redis, *, key: bytes) -> list[NDArray[np.void]]:
    """Fields of a hash as `FIELD_DTYPE`, in parts, without their values.

    Raises:
        StoreError: something else wrote into the bucket.
    """
    parts = []
    try:
        cursor = 0
        while True:
            cursor, fields = client.hscan(key, cursor, count=_SCAN_FIELDS, no_values=True)
            parts.append(decode_fields(fields))
            if cursor == 0:
                return parts
    except redis.ResponseError as error:
        if isinstance(error, _ELSEWHERE):
            raise
        # HSCAN NOVALUES needs Redis 7.4 or Valkey 8; one bucket's fields at once are the next best.
        return [decode_fields(client.hkeys(key))]
