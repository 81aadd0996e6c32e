"""`Namespace`: the schema record of a namespace on every server. All records are compared before any is written.

    check: record of server 0, 1, ... ──compare──> all match: True; no record and no rows: False; else InputError
    claim: check, then create the missing records; server 0 last, whose record means that the namespace is claimed
    as_recorded, removed_records: the layout of the records that exist, and their removal

Every server has a record with its position in the list. Rows are placed by position, so without the record a server
that lost its data, or a reordered list, would look like rows that were never written. A cluster counts as one server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import distinct_fields
from bagpipe.store.interface import HELD_ID_BYTES
from bagpipe.store.keys import bucket_key, meta_key
from bagpipe.store.redis.bucket_scan import bucket_fields
from bagpipe.store.redis.reply_forms import COUNT
from bagpipe.store.redis.routing import servers_of_buckets
from bagpipe.store.redis.server_checks import (
    check_durability,
    check_eviction,
    check_replay,
    check_rights,
    denied_commands,
    needs_appendfsync,
    replayed_commands,
)
from bagpipe.store.redis.server_versions import scripting_advice
from bagpipe.store.redis.servers import KeyCommand
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.types.schema import RowSchema
from bagpipe.util.distinct_ids import distinct_ids

__all__ = ["Backend", "Namespace", "Session"]

T = TypeVar("T")

_ID_BYTES = np.dtype(np.int64).itemsize
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

    def infos(
        self, timeout_s: float, *, with_fsync: bool = False, replayed: Sequence[KeyCommand] = ()
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """(endpoint, INFO) of every server that stores rows. See `bagpipe.store.redis.servers.Server.infos`."""
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

    def check_servers(self, *, writes: bool = False) -> list[str]:
        """Refuse a server that can evict rows, is only a part of a cluster, is not durable enough, or is named twice.

        Args:
            writes: refuse one that would drop rows when it is restarted, too.

        Returns:
            Advice about servers that should be replaced by newer ones, or do not tell what should be known.

        Raises:
            InputError: names the server, its settings and the fix.
        """
        seen: dict[object, str] = {}
        advice: list[str] = []
        with_fsync = needs_appendfsync(self.durability)
        for number, backend in enumerate(self.backends):
            replayed = replayed_commands(self._keys(number)[0]) if writes else ()
            for endpoint, info in backend.infos(self.timeout_s, with_fsync=with_fsync, replayed=replayed):
                check_eviction(endpoint, info)
                check_durability(endpoint, info, str(info.get("appendfsync", "")), self.durability)
                # Detects one server under two addresses; two databases of a server count as two servers.
                identity = (info.get("run_id"), backend.database)
                if info.get("run_id") is not None and identity in seen:
                    raise InputError(f"store.url names one server twice: {seen[identity]} and {endpoint}")
                seen[identity] = endpoint
                advice += (scripting_advice(endpoint, info), check_replay(endpoint, info))
        return list(filter(None, advice))

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """See `Store.check`."""
        self.check_servers(writes=True)
        claimed = self._is_claimed(self._stored_records(reloads=reloads, resets=resets))
        self._check_rights()
        return claimed

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`. Logs the advice of `check_servers`."""
        for advice in self.check_servers(writes=True):
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

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store.ids_by_table`. Lists the names of all rows once for each group, and once more to make groups."""
        for group in self._groups(tables):
            parts: dict[int, list[NDArray[np.int64]]] = {table: [np.empty(0, np.int64)] for table in group}
            for fields in self._fields():
                for part in fields:
                    _split_by_table(part, parts)
            # HSCAN can return a field twice while the hash grows.
            yield {table: distinct_ids(parts.pop(table)) for table in group}

    def num_rows(self) -> NDArray[np.int64]:
        """Rows of each table, int64 ``[num_tables]``. Lists the names of all rows once."""
        counts = np.zeros(len(self.schema.tables), np.int64)
        for fields in self._fields():
            tables = distinct_fields(np.concatenate(fields))["table"].astype(np.int64)
            counts += np.bincount(tables, minlength=len(counts))[: len(counts)]
        return counts

    def _groups(self, tables: Sequence[int]) -> list[list[int]]:
        """Consecutive tables whose ids are held together."""
        if len(tables) == 1 or self._count() * _ID_BYTES <= HELD_ID_BYTES:
            return [list(tables)]
        groups: list[list[int]] = [[]]
        counts, held = self.num_rows() * _ID_BYTES, 0
        for table in tables:
            if groups[-1] and held + counts[table] > HELD_ID_BYTES:
                groups.append([])
                held = 0
            groups[-1].append(table)
            held += int(counts[table])
        return groups

    def _count(self) -> int:
        """Rows of all tables."""
        total = 0
        for number, backend in enumerate(self.backends):
            with backend.session(self.timeout_s) as session:
                total += sum(session.run_all([KeyCommand(key, ("HLEN", key), COUNT) for key in self._keys(number)]))
        return total

    def _fields(self) -> Iterator[list[NDArray[np.void]]]:
        """Names of the rows of each bucket, as `FIELD_DTYPE`, in one part or more; some twice."""
        row_bytes = max(self.schema.row_bytes(number) for number in range(len(self.schema.tables)))
        scan = partial(bucket_fields, row_bytes=row_bytes, timeout_s=self.timeout_s)
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


def _split_by_table(fields: NDArray[np.void], parts: Mapping[int, list[NDArray[np.int64]]]) -> None:
    """Append the ids of `fields` to those of their tables; ids of other tables are passed over."""
    fields = fields[np.argsort(fields["table"], kind="stable")]
    tables, first = np.unique(fields["table"], return_index=True)
    ids = fields["id"].astype(np.int64)
    for table, (start, end) in zip(tables.tolist(), pairwise([*first.tolist(), len(ids)]), strict=True):
        if table in parts:
            parts[table].append(ids[start:end])


def _decode(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
