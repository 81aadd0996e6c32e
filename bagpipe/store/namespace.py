"""A namespace's keys and its schema record on every server. Rule: compare everything before writing anything.

    check: record of server 0, 1, ... ──compare──> all match: True; none, and no rows: False; else refuse
    claim: check, then create the missing records, server 0 last: its record says that the namespace is claimed

Every server keeps its own record, with its position in the list: rows are spread by position, so a server that lost its
data, or a list in another order, would silently look like rows never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import redis
from numpy.typing import NDArray

from bagpipe.errors import InputError, StoreError
from bagpipe.schema import RowSchema
from bagpipe.store.keys import bucket_key, decode_fields, meta_key
from bagpipe.store.record import SchemaRecord
from bagpipe.store.servers import Server

__all__ = ["Namespace"]

#: Fields asked for per step of a scan: a few milliseconds of the server's time.
_SCAN_FIELDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Keys and schema record of one namespace.

    Attributes:
        name: prefix of all keys.
        schema: what the rows mean.
        num_buckets: bucket hashes, spread over the servers by number.
        servers: all servers, in order.
        timeout_s: deadline of one administrative command.
    """

    name: str
    schema: RowSchema
    num_buckets: int
    servers: tuple[Server, ...]
    timeout_s: float

    def bucket_keys(self) -> list[bytes]:
        """Key of every bucket."""
        return [bucket_key(self.name, bucket) for bucket in range(self.num_buckets)]

    def refuse_unsafe_servers(self) -> None:
        """Refuse a server that may drop rows, serves rows only partly, or is named twice.

        Raises:
            InputError: names the server, what it is set to, and the fix.
        """
        seen: dict[tuple[object, int], str] = {}
        for server in self.servers:
            with server.admin(self.timeout_s) as client:
                info = client.info()
            policy, max_bytes = info.get("maxmemory_policy"), int(info.get("maxmemory", 0))
            if policy is None:
                raise InputError(f"store {server.place}: INFO does not tell maxmemory_policy, so rows may be dropped")
            if max_bytes > 0 and policy != "noeviction":
                raise InputError(
                    f"store {server.place} drops rows when full: maxmemory {max_bytes} with maxmemory-policy {policy}, "
                    f"expected noeviction; run CONFIG SET maxmemory-policy noeviction"
                )
            if int(info.get("cluster_enabled", 0)):
                raise InputError(f"store {server.place} is a node of a cluster, expected a server on its own")
            identity = (info.get("run_id"), server.settings["db"])
            if info.get("run_id") is not None and identity in seen:
                raise InputError(f"store.url names one server twice: {seen[identity]} and {server.place}")
            seen[identity] = server.place

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
        for number in reversed(range(len(self.servers))):
            created = self._create_record(number)
        return created

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        parts = [np.empty(0, np.int64)]
        for number, server in enumerate(self.servers):
            with server.admin(self.timeout_s) as client:
                for bucket in range(number, self.num_buckets, len(self.servers)):
                    for fields in _scan(client, bucket_key(self.name, bucket)):
                        pairs = decode_fields(fields)
                        parts.append(pairs["id"][pairs["table"] == table].astype(np.int64))
        # A scan may show a field twice while the hash grows.
        return np.unique(np.concatenate(parts))

    def _place(self, number: int) -> str:
        return f"namespace {self.name!r} at {self.servers[number].place}"

    def _record(self, number: int) -> SchemaRecord:
        return SchemaRecord(
            schema=self.schema, num_buckets=self.num_buckets, num_servers=len(self.servers), server=number
        )

    def _stored_records(self) -> list[dict[str, str] | None]:
        """Every server's record, compared with ours; None where there is none.

        Raises:
            InputError: a record differs, or rows exist without the record of their server, or of server 0.
        """
        records: list[dict[str, str] | None] = []
        has_rows: list[bool] = []
        for number, server in enumerate(self.servers):
            with server.admin(self.timeout_s) as client:
                records.append(_decode(client.hgetall(meta_key(self.name))) or None)
                own = [bucket_key(self.name, bucket) for bucket in range(number, self.num_buckets, len(self.servers))]
                has_rows.append(bool(client.exists(*own)))
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
        with self.servers[number].admin(self.timeout_s) as client, client.pipeline() as pipeline:
            pipeline.watch(key)
            stored = _decode(pipeline.hgetall(key))
            if not stored:
                pipeline.multi()
                pipeline.hset(key, mapping=record.to_fields())
                try:
                    pipeline.execute()
                    return True
                except redis.WatchError:  # another job wrote it between WATCH and EXEC
                    stored = _decode(client.hgetall(key))
        record.compare(stored, self._place(number))
        return False


def _decode(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}


def _scan(client: redis.Redis, key: bytes) -> Iterator[list[bytes]]:
    """Fields of a hash, in parts, without their values.

    Raises:
        StoreError: the server failed.
    """
    try:
        cursor = 0
        while True:
            cursor, fields = client.hscan(key, cursor, count=_SCAN_FIELDS, no_values=True)
            yield list(fields)
            if cursor == 0:
                return
    except redis.ResponseError:
        # HSCAN NOVALUES needs Redis 7.4 or Valkey 8; one bucket's fields at once are the next best.
        pass
    try:
        yield list(client.hkeys(key))
    except redis.RedisError as error:
        raise StoreError(f"cannot list the rows of {key.decode()}: {error}") from error
