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
from bagpipe.schema import RowSchema
from bagpipe.store.keys import bucket_key, decode_fields, meta_key
from bagpipe.store.record import SchemaRecord
from bagpipe.store.routing import spread
from bagpipe.store.servers import refuse_unsafe

__all__ = ["Home", "Namespace"]

T = TypeVar("T")

#: Answers of a cluster's node that say nothing about the command.
_ELSEWHERE = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)

#: Fields asked for per step of a scan: a few milliseconds of the server's time.
_SCAN_FIELDS = 10_000


class Session(Protocol):
    """Commands on keys of one home; errors come out as `InputError`."""

    def run(self, key: bytes, call: Callable[[redis.Redis], T]) -> T:
        """What `call` returns, given a client of the server that has `key`; it may be called more than once."""
        ...

    def any_exists(self, keys: Sequence[bytes]) -> bool:
        """One of the keys exists."""
        ...


class Home(Protocol):
    """What keeps a record and the buckets that go with it: a server of a list, or a whole cluster."""

    @property
    def place(self) -> str:
        """For messages."""
        ...

    @property
    def database(self) -> int:
        """Number of the database at the server."""
        ...

    def infos(self, timeout_s: float) -> list[tuple[str, Mapping[str, Any]]]:
        """(place, INFO) of every server that takes rows."""
        ...

    def session(self, timeout_s: float) -> AbstractContextManager[Session]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Schema record and rows of one namespace.

    Attributes:
        name: prefix of all keys.
        schema: what the rows mean.
        num_buckets: bucket hashes, spread over the servers by number.
        homes: all servers, in order; or one cluster.
        timeout_s: deadline of one administrative command.
    """

    name: str
    schema: RowSchema
    num_buckets: int
    homes: tuple[Home, ...]
    timeout_s: float

    def refuse_unsafe_servers(self) -> None:
        """Refuse a server that may drop rows, serves rows only partly, or is named twice.

        Raises:
            InputError: names the server, what it is set to, and the fix.
        """
        seen: dict[object, str] = {}
        for home in self.homes:
            for place, info in home.infos(self.timeout_s):
                refuse_unsafe(place, info)
                # A server named twice under two addresses; two databases of one server are two servers.
                identity = (info.get("run_id"), home.database)
                if info.get("run_id") is not None and identity in seen:
                    raise InputError(f"store.url names one server twice: {seen[identity]} and {place}")
                seen[identity] = place

    def check(self) -> bool:
        """See `Store.check`."""
        self.refuse_unsafe_servers()
        return self._stored_records()[0] is not None

    def claim(self) -> bool:
        """See `Store.claim`."""
        if self.check():
            return False
        created = False
        # Server 0 last. Two jobs that claim at once both create or match the others; one of them creates this one.
        for number in reversed(range(len(self.homes))):
            created = self._create_record(number)
        return created

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        parts = [np.empty(0, np.int64)]
        for number, home in enumerate(self.homes):
            with home.session(self.timeout_s) as session:
                for key in self._keys(number):
                    for pairs in session.run(key, partial(_scan, key=key)):
                        parts.append(pairs["id"][pairs["table"] == table].astype(np.int64))
        # A scan may show a field twice while the hash grows.
        return np.unique(np.concatenate(parts))

    def _keys(self, number: int) -> list[bytes]:
        """Keys of a home's buckets."""
        buckets = np.flatnonzero(spread(self.num_buckets, len(self.homes)) == number)
        return [bucket_key(self.name, bucket) for bucket in buckets.tolist()]

    def _place(self, number: int) -> str:
        return f"namespace {self.name!r} at {self.homes[number].place}"

    def _record(self, number: int) -> SchemaRecord:
        return SchemaRecord(
            schema=self.schema, num_buckets=self.num_buckets, num_servers=len(self.homes), server=number
        )

    def _stored_records(self) -> list[dict[str, str] | None]:
        """Every server's record, compared with ours; None where there is none.

        Raises:
            InputError: a record differs, or rows exist without the record of their server, or of server 0.
        """
        records: list[dict[str, str] | None] = []
        has_rows: list[bool] = []
        key = meta_key(self.name)
        for number, home in enumerate(self.homes):
            with home.session(self.timeout_s) as session:
                records.append(_decode(session.run(key, lambda client: client.hgetall(key))) or None)
                has_rows.append(session.any_exists(self._keys(number)))
        for number, record in enumerate(records):
            if record is not None:
                self._record(number).compare(record, self._place(number))
        claimed = records[0] is not None
        for number, record in enumerate(records):
            if record is None and has_rows[number]:
                raise InputError(f"{self._place(number)} holds rows but no schema record; use another store.namespace")
            if record is None and claimed:
                raise InputError(
                    f"{self._place(number)} has lost its data: server 0 has a schema record, this one has none"
                )
            if not claimed and has_rows[number]:
                raise InputError(f"{self._place(0)} has lost its data: server {number} holds rows, this one no record")
        return records

    def _create_record(self, number: int) -> bool:
        """Write one server's record if it has none, else compare. True if this call wrote it. Atomic (WATCH, EXEC)."""
        key, record = meta_key(self.name), self._record(number)
        with self.homes[number].session(self.timeout_s) as session:
            stored = session.run(key, partial(_create, key=key, fields=record.to_fields()))
        if stored is None:
            return True
        record.compare(stored, self._place(number))
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
