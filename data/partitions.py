"""`Partitions`: the columns that the folders of files stand for, as in Hive: `dt=2026-11-27/hour=7/part-0.parquet`.

    folders named KEY=VALUE directly above a file ──> columns of one value: {"dt": b"2026-11-27", "hour": 7}

A column holds integers if all its values are integers of 64 bits, signed or unsigned, else strings (binary). It holds
strings too if a table takes them for ids (`with_texts`): 02 is then another id than 2. `__HIVE_DEFAULT_PARTITION__` is
a null. Names and values are percent-decoded, as Spark, Hive and Arrow write them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote_to_bytes

import pyarrow as pa

from bagpipe.errors import InputError
from bagpipe.files.data_folder import is_partition

__all__ = ["Partitions"]

_NULL = b"__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(rb"-?[0-9]{1,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitions:
    """The columns of the folders of files.

    Attributes:
        types: (column, int64, uint64 or binary) pairs.
    """

    types: tuple[tuple[str, pa.DataType], ...] = ()

    @classmethod
    def of(cls, paths: Iterable[str]) -> Partitions:
        """The columns of these files.

        Raises:
            InputError: the folders of a file have the same key twice.
        """
        values: dict[str, set[bytes]] = {}
        folders = dict.fromkeys(path.rpartition("/")[0] for path in paths)
        for folder in folders:
            for name, value in _values(folder).items():
                values.setdefault(name, set()).add(value)
        return cls(types=tuple((name, _type_of(found - {_NULL})) for name, found in values.items()))

    def with_texts(self, names: Container[str]) -> Partitions:
        """These columns, with strings in those of these names."""
        return replace(self, types=tuple((name, pa.binary() if name in names else kind) for name, kind in self.types))

    def added_to(self, path: str, schema: pa.Schema) -> pa.Schema:
        """The columns of a file, and those of its folders that it does not have itself.

        Args:
            path: of the file.
            schema: of its own columns.
        """
        fields = [pa.field(name, kind) for name, kind in self._of(path) if name not in schema.names]
        return pa.schema([*schema, *fields], metadata=schema.metadata) if fields else schema

    def column(self, path: str, name: str, num_rows: int) -> pa.Array:
        """A column of a file's folders, with one value in all rows."""
        kind = dict(self.types)[name]
        value = _values(path.rpartition("/")[0])[name]
        return pa.repeat(pa.scalar(_parsed(value, kind), kind), num_rows)

    def _of(self, path: str) -> list[tuple[str, pa.DataType]]:
        if not self.types:
            return []
        names = _values(path.rpartition("/")[0])
        return [(name, kind) for name, kind in self.types if name in names]


def _values(folder: str) -> Mapping[str, bytes]:
    """Name and text of the partitions that a folder is, outermost first."""
    found: dict[str, bytes] = {}
    for part in reversed(folder.split("/")):
        if not is_partition(part):
            break
        key, _, value = part.partition("=")
        name = unquote_to_bytes(os.fsencode(key)).decode("utf-8", "surrogateescape")
        if name in found:
            raise InputError(f"{folder}: expected each key once in the names of its folders, got {name!r} twice")
        found[name] = unquote_to_bytes(os.fsencode(value))
    return dict(reversed(found.items()))


def _type_of(values: set[bytes]) -> pa.DataType:
    if not all(map(_INTEGER.fullmatch, values)):
        return pa.binary()
    numbers = [int(value) for value in values] or [0]
    if min(numbers) >= -(2**63) and max(numbers) < 2**63:
        return pa.int64()
    return pa.uint64() if min(numbers) >= 0 and max(numbers) < 2**64 else pa.binary()


def _parsed(value: bytes, kind: pa.DataType) -> int | bytes | None:
    if value == _NULL:
        return None
    return value if kind == pa.binary() else int(value)
