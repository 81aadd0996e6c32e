"""`Namespace`: the schema record of a namespace on every server. All records are compared before any is written.

    check: record of server 0, 1, ... ──compare──> all match: True; no record and no rows: False; else InputError
    claim: check, then create the missing records; server 0 last, whose record means that the namespace is claimed
    as_recorded, removed_records: the layout of the records that exist, and their removal

Every server has a record with its position in the list. Rows are placed by position, so without the record a server
that lost its data, or a reordered list, would look like rows that were never written. A cluster counts as one server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import distinct_fields
from bagpipe.store.keys import bucket_key, decode_fields, meta_key
from bagpipe.store.redis.reply_forms import COUNT
from bagpipe.store.redis.routing import servers_of_buckets
from bagpipe.store.redis.server_checks import (
    check_durability,
    check_eviction,
    check_rights,
    denied_commands,
    needs_appendfsync,
)
from bagpipe.store.redis.server_versions import scripting_advice
from bagpipe.store.redis.servers import KeyCommand
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.types.schema import RowSchema
from bagpipe.util.distinct_ids import distinct_ids

__all__ = ["Backend", "Namespace", "scanned"]

T = TypeVar("T")

#: Errors of a cluster's node that do not concern the command.
_ELSEWHERE = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)

#: Fields per HSCAN step: a few milliseconds of server time.
_SCAN_FIELDS = 10_000
#: Fields of a bucket that a server without NOVALUES is asked for at once, and bytes of rows per step of a larger one.
_HKEYS_FIELDS = 200_000
_SCAN_BYTES = 4 << 20
#: Bytes of a reply's field and value beside the row, rounded up.
_PAIR_BYTES = 64
#: Times that a scan can return a field of a hash that grows or shrinks.
_MAX_RETURNS = 4

#: Buckets whose servers are asked for the user's rights: reaches all, or most, nodes of a cluster.
_ASKED_BUCKETS = 64


class Session(Protocol):
    """Runs commands on keys of one backend; errors become `InputError`."""

    def run(self, key: bytes, call: Callable[[redis.Redis], T]) -> T:
        """Return `call(client of the key's server)`; may call it more than once."""
        ...

    def run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Replies to idempotent commands, in order."""
        ...


class Backend(Protocol):
    """A server of a list, or a whole cluster: holds one schema record and some of the buckets."""

    @property
    def endpoint(self) -> str:
        """Address without the password, for messages."""
        ...

    @property
    def database(self) -> int:
        """Number of the database."""
        ...

    def infos(self, timeout_s: float, *, with_fsync: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
        """(endpoint, INFO) of every server that stores rows; `with_fsync` adds its appendfsync."""
        ...

    def session(self, timeout_s: float) -> AbstractContextManager[Session]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A backend's schema record, if it has one, and whether it has rows."""

    fields: dict[str, str] | None
    has_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Schema record and rows of one namespace.

    Attributes:
        name: prefix of all keys.
        schema: tables, row widths and dtype.
        num_buckets: bucket hashes, distributed over the backends by number.
        backends: all servers in order, or one cluster.
        timeout_s: limit of one administrative command.
        durability: see `bagpipe.store.redis.server_checks`.
    """

    name: str
    schema: RowSchema
    num_buckets: int
    backends: tuple[Backend, ...]
    timeout_s: float
    durability: str = "memory"

    def check_servers(self) -> list[str]:
        """Refuse a server that can evict rows, is only a part of a cluster, is not durable enough, or is named twice.

        Returns:
            Advice about servers that should be replaced by newer ones.

        Raises:
            InputError: names the server, its settings and the fix.
        """
        seen: dict[object, str] = {}
        advice: list[str] = []
        for backend in self.backends:
            for endpoint, info in backend.infos(self.timeout_s, with_fsync=needs_appendfsync(self.durability)):
                check_eviction(endpoint, info)
                check_durability(endpoint, info, str(info.get("appendfsync", "")), self.durability)
                # Detects one server under two addresses; two databases of a server count as two servers.
                identity = (info.get("run_id"), backend.database)
                if info.get("run_id") is not None and identity in seen:
                    raise InputError(f"store.url names one server twice: {seen[identity]} and {endpoint}")
                seen[identity] = endpoint
                advice.append(scripting_advice(endpoint, info))
        return list(filter(None, advice))

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """See `Store.check`."""
        self.check_servers()
        claimed = self._is_claimed(self._stored_records(reloads=reloads, resets=resets))
        self._check_rights()
        return claimed

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`. Logs a warning about each server whose scripting can be broken into."""
        for advice in self.check_servers():
            logging.getLogger(__name__).warning("%s", advice)
        records = self._stored_records(reloads=reloads)
        created = False
        # Server 0 last: of two concurrent jobs, exactly one creates its record.
        for number in reversed(range(len(self.backends))):
            if records[number].fields is None:
                created = self._create_record(number)
        return created and not self._is_claimed(records)

    def as_recorded(self) -> Namespace:
        """This namespace with the number of buckets that its record states, if it has one.

        Raises:
            InputError: as `check` with ``resets``.
        """
        fields = self._stored_records(reloads=True, resets=True)[0].fields
        if fields is None:
            return self
        return replace(self, num_buckets=SchemaRecord.num_buckets_of(fields, self.label_of(0)))

    @contextmanager
    def removed_records(self) -> Iterator[None]:
        """Remove all schema records. An error that leaves the block puts them back."""
        key = meta_key(self.name)
        removed: list[tuple[Backend, dict[str, str]]] = []
        for backend in self.backends:
            with backend.session(self.timeout_s) as session:
                fields = session.run(key, partial(_fields, key=key))
                session.run(key, lambda client: client.delete(key))
            removed.append((backend, fields))
        try:
            yield
        except BaseException:
            for backend, fields in removed:
                if fields:
                    with backend.session(self.timeout_s) as session:
                        session.run(key, partial(_create, key=key, fields=fields))
            raise

    @property
    def bucket_keys(self) -> list[bytes]:
        """Key of every bucket, by number."""
        return [bucket_key(self.name, bucket) for bucket in range(self.num_buckets)]

    @property
    def backend_numbers(self) -> NDArray[np.int64]:
        """Number of each bucket's backend."""
        return servers_of_buckets(self.num_buckets, len(self.backends)).astype(np.int64)

    def label_of(self, number: int) -> str:
        """Namespace and backend, for messages."""
        return f"namespace {self.name!r} at {self.backends[number].endpoint}"

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        parts = [np.empty(0, np.int64)]
        for fields in self._fields():
            parts += [pairs["id"][pairs["table"] == table].astype(np.int64) for pairs in fields]
        # HSCAN can return a field twice while the hash grows.
        return distinct_ids(parts)

    def num_rows(self) -> NDArray[np.int64]:
        """Rows of each table, int64 ``[num_tables]``. Lists the names of all rows once."""
        counts = np.zeros(len(self.schema.tables), np.int64)
        for fields in self._fields():
            tables = distinct_fields(np.concatenate(fields))["table"].astype(np.int64)
            counts += np.bincount(tables, minlength=len(counts))[: len(counts)]
        return counts

    def _fields(self) -> Iterator[list[NDArray[np.void]]]:
        """Names of the rows of each bucket, as `FIELD_DTYPE`, in one part or more; some twice."""
        row_bytes = max(self.schema.row_bytes(number) for number in range(len(self.schema.tables)))
        scan = partial(_scan, row_bytes=row_bytes, timeout_s=self.timeout_s)
        for number, backend in enumerate(self.backends):
            with backend.session(self.timeout_s) as session:
                for key in self._keys(number):
                    yield session.run(key, partial(scan, key=key))

    def _keys(self, number: int) -> list[bytes]:
        """Keys of a backend's buckets."""
        buckets = np.flatnonzero(servers_of_buckets(self.num_buckets, len(self.backends)) == number)
        return [bucket_key(self.name, bucket) for bucket in buckets.tolist()]

    def _check_rights(self) -> None:
        """Check the user's rights on every server, and on every cluster node with one of the first buckets."""
        for number, backend in enumerate(self.backends):
            keys = self._keys(number)[:_ASKED_BUCKETS]
            with backend.session(self.timeout_s) as session:
                denied = session.run_all([denied_commands(key) for key in keys])
            check_rights(backend.endpoint, sorted({name for names in denied for name in names}))

    def _record(self, number: int) -> SchemaRecord:
        return SchemaRecord(
            schema=self.schema, num_buckets=self.num_buckets, num_servers=len(self.backends), server=number
        )

    def _is_claimed(self, records: Sequence[_Stored]) -> bool:
        """Whether an earlier call claimed it. If server 0 has no record, that call was cut short or it is lost."""
        return records[0].fields is not None or any(record.has_rows for record in records)

    def _stored_records(self, *, reloads: bool, resets: bool = False) -> list[_Stored]:
        """Every server's record, compared with this job's; with `resets` only in what says where the rows are.

        Raises:
            InputError: a record differs; or a server has rows without a record; or, unless `reloads`, a server has
                lost its record.
        """
        records: list[_Stored] = []
        key = meta_key(self.name)
        for number, backend in enumerate(self.backends):
            with backend.session(self.timeout_s) as session:
                fields = session.run(key, partial(_fields, key=key)) or None
                exist = session.run_all(
                    [KeyCommand(bucket, ("EXISTS", bucket), COUNT) for bucket in self._keys(number)]
                )
            records.append(_Stored(fields=fields, has_rows=any(exist)))
        for number, record in enumerate(records):
            if record.fields is not None:
                compare = SchemaRecord.compare_place if resets else SchemaRecord.compare
                compare(self._record(number), record.fields, self.label_of(number))
        claimed = records[0].fields is not None
        for number, record in enumerate(records):
            if record.fields is None and record.has_rows:
                raise InputError(
                    f"{self.label_of(number)} holds rows but no schema record; use another store.namespace"
                )
            if reloads:
                continue
            if record.fields is None and claimed:
                raise InputError(
                    f"{self.label_of(number)} has lost its data: server 0 has a schema record, this one has none"
                )
            if not claimed and record.has_rows:
                raise InputError(
                    f"{self.label_of(0)} has lost its data: server {number} holds rows, this one no record"
                )
        return records

    def _create_record(self, number: int) -> bool:
        """Write one server's record unless it exists, else compare. True if written. Atomic (WATCH, EXEC)."""
        key, record = meta_key(self.name), self._record(number)
        with self.backends[number].session(self.timeout_s) as session:
            stored = session.run(key, partial(_create, key=key, fields=record.to_fields()))
        if stored is None:
            return True
        record.compare(stored, self.label_of(number))
        return False


def _fields(client: redis.Redis, *, key: bytes) -> dict[str, str]:
    """A hash."""
    return _decode(client.hgetall(key))


def _create(client: redis.Redis, *, key: bytes, fields: Mapping[str, str]) -> dict[str, str] | None:
    """Write a hash unless it exists. Returns None if written, else the existing fields. Atomic."""
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
            return _fields(client, key=key)
    return None


def _decode(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}


def _scan(client: redis.Redis, *, key: bytes, row_bytes: int, timeout_s: float) -> list[NDArray[np.void]]:
    """Fields of a hash as `FIELD_DTYPE`, in parts.

    Raises:
        StoreError: another program wrote into the bucket.
        redis.InvalidResponse: more fields than the hash has, or none for `timeout_s` and no end.
    """
    num_fields = int(client.hlen(key))
    try:
        return list(scanned(client, key, num_fields, timeout_s, count=_SCAN_FIELDS, no_values=True))
    except redis.ResponseError as error:
        if isinstance(error, _ELSEWHERE):
            raise
    # HSCAN NOVALUES needs Redis 7.4 or Valkey 8.
    if num_fields <= _HKEYS_FIELDS:
        return [decode_fields(client.hkeys(key))]
    count = max(1, min(_SCAN_FIELDS, _SCAN_BYTES // (row_bytes + _PAIR_BYTES)))
    return list(scanned(client, key, num_fields, timeout_s, count=count, no_values=False))


def scanned(
    client: redis.Redis, key: bytes, num_fields: int, timeout_s: float, *, count: int, no_values: bool
) -> Iterator[NDArray[np.void]]:
    """Fields of a hash as `FIELD_DTYPE`, step by step.

    Args:
        client: of its server.
        key: of the hash.
        num_fields: that it has.
        timeout_s: longest time without a field.
        count: fields of a step, about.
        no_values: receive fields without values.

    Raises:
        StoreError: another program wrote into the bucket.
        redis.InvalidResponse: more fields than the hash has, or none for `timeout_s` and no end.
    """
    cursor, left = 0, _MAX_RETURNS * (num_fields + _SCAN_FIELDS)
    deadline_s = time.monotonic() + timeout_s
    while True:
        cursor, fields = client.hscan(key, cursor, count=count, no_values=no_values or None)
        yield decode_fields(list(fields))
        if cursor == 0:
            return
        left -= len(fields)
        if fields:
            deadline_s = time.monotonic() + timeout_s
        if left < 0 or time.monotonic() > deadline_s:
            raise redis.InvalidResponse(f"a scan of {key.decode()} that does not end")
