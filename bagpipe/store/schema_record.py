"""`SchemaRecord`: schema and layout of a namespace, stored beside its rows and compared when a job opens it.

    RowSchema + layout ──SchemaRecord.to_fields──> hash <namespace>:meta ──compare──> InputError

No I/O: stores read and write the fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError
from bagpipe.store.keys import FORMAT_VERSION, MAX_BUCKETS
from bagpipe.types.schema import RowSchema
from bagpipe.util.documents import parse_json

__all__ = ["SchemaRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRecord:
    """Everything that two jobs must agree on to share a namespace.

    Attributes:
        schema: tables, dims, optimizer, dtype, seed.
        num_buckets: bucket hashes of the namespace.
        num_servers: servers the buckets are spread over.
        server: position of this server in the list; every server has a record.
        format_version: layout of keys, fields and rows.
    """

    schema: RowSchema
    num_buckets: int
    num_servers: int = 1
    server: int = 0
    format_version: int = FORMAT_VERSION

    def to_fields(self) -> dict[str, str]:
        """Fields of the record's hash, as text for `redis-cli HGETALL`."""
        return {
            "format": str(self.format_version),
            "buckets": str(self.num_buckets),
            "servers": str(self.num_servers),
            "server": str(self.server),
            "schema": json.dumps(self.schema.to_json(), sort_keys=True),
            "digest": self.schema.digest(),
        }

    def compare(self, stored: Mapping[str, str], label: str) -> None:
        """Refuse a stored record that differs from this one.

        Args:
            stored: fields read from the store; not empty.
            label: the namespace and server, for the message.

        Raises:
            InputError: names the first field that differs, with both values.
        """
        self.compare_place(stored, label)
        found = self.difference(stored, label)
        if found is not None:
            name, theirs, ours = found
            raise InputError(
                f"{label} was made with {name} {theirs!r}, this job has {ours!r}: use another store.namespace, or "
                "delete its rows with store.existing=reset"
            )

    def difference(self, stored: Mapping[str, str], label: str) -> tuple[str, Any, Any] | None:
        """The first field of a stored record that differs, its value there and here. None: there is none.

        Raises:
            InputError: the stored schema is not one.
        """
        return next((pair for pair in self._pairs(stored, label) if pair[1] != pair[2]), None)

    def compare_place(self, stored: Mapping[str, str], label: str) -> None:
        """Refuse a stored record that puts rows elsewhere than this one does. The number of buckets can differ.

        Raises:
            InputError: names the first field that differs, with both values.
        """
        for name, field, ours in (
            ("format version", "format", self.format_version),
            ("number of servers", "servers", self.num_servers),
            ("server position", "server", self.server),
        ):
            if stored.get(field) != str(ours):
                raise InputError(f"{label} was made with {name} {stored.get(field)!r}, this job has {str(ours)!r}")

    @staticmethod
    def num_buckets_of(stored: Mapping[str, str], label: str) -> int:
        """Number of buckets that a stored record states. Raises InputError if it is not valid."""
        buckets = stored.get("buckets", "")
        if not buckets.isdecimal() or not 1 <= int(buckets) <= MAX_BUCKETS:
            raise InputError(f"{label} was made with store.buckets {buckets!r}, expected 1 to {MAX_BUCKETS}")
        return int(buckets)

    def _pairs(self, stored: Mapping[str, str], label: str) -> Iterator[tuple[str, Any, Any]]:
        """(name, stored value, our value); a pair is meaningful only if all earlier pairs agree."""
        yield "store.buckets", stored.get("buckets"), str(self.num_buckets)
        theirs, ours = _parse_schema(stored.get("schema", ""), label), self.schema.to_json()
        yield "optimizer", theirs.get("optimizer"), ours["optimizer"]
        yield "dtype", theirs.get("dtype"), ours["dtype"]
        yield "seed", theirs.get("seed"), ours["seed"]
        their_tables, our_tables = _tables(theirs), _tables(ours)
        yield "tables", [table.get("name") for table in their_tables], [table["name"] for table in our_tables]
        for their_table, our_table in zip(their_tables, our_tables, strict=True):
            for field, value in our_table.items():
                yield f"table {our_table['name']!r} {field}", their_table.get(field), value
        yield "rounding", theirs.get("rounding", "nearest"), ours.get("rounding", "nearest")
        yield "schema digest", stored.get("digest"), self.schema.digest()


def _parse_schema(text: str, label: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{label} holds a schema record that is not a JSON object: {text[:80]!r}")
    return value


def _tables(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    tables = schema.get("tables")
    if not isinstance(tables, list | tuple):
        return []
    # A table without an optimizer or a dtype of its own has the schema's.
    shared = {field: schema.get(field) for field in ("optimizer", "dtype")}
    return [{**shared, **table} for table in tables if isinstance(table, dict)]
