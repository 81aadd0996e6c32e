"""`RowClient`: vectors of ids, from an export's files or from the store of a job. It can only read.

    ids by table ──RowSource: FileRows | LiveRows──> weights, which are found ─┐
                 ──not found: InitialRows──────────> their initial values ─────┴──> vectors [n, dim] by table

It needs numpy, and for a store the Python package redis; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.serving.initial_rows import InitialRows
from bagpipe.serving.row_words import CodedRows, code_rows
from bagpipe.types.schema import RowSchema
from bagpipe.types.splitmix64 import hash_ids

__all__ = ["RowClient", "RowSource", "ServedTable"]


class RowSource(Protocol):
    """Stored rows, by number of the table in the schema."""

    @property
    def schema(self) -> RowSchema: ...

    @property
    def decay(self) -> Mapping[str, float | None]:
        """Factor of the weights of new rows, by table; of tables whose rows decay."""
        ...

    def read(
        self, requests: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> list[tuple[NDArray[Any], NDArray[np.bool_]]]: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTable:
    """A table of a client.

    Attributes:
        dim: width of a vector.
        rows: ids lie in ``[0, rows)``; None: any 64-bit id.
        dtype: of the trained weights, a key of `bagpipe.types.schema.ROW_TYPES`.
    """

    dim: int
    rows: int | None
    dtype: str


class RowClient:
    """Vectors of ids by table. Context manager. One thread at a time with a store, any number with files.

    Args:
        source: the stored rows.

    Attributes:
        tables: by name.
        dtype: of the vectors: float32, or float64 for a job of float64.
    """

    def __init__(self, source: RowSource) -> None:
        schema = source.schema
        self.tables: Mapping[str, ServedTable] = {
            table.name: ServedTable(dim=table.dim, rows=table.vocabulary, dtype=schema.dtype_of(number))
            for number, table in enumerate(schema.tables)
        }
        self.dtype = np.dtype(schema.row_type.compute)
        self._source = source
        self._numbers = {table.name: number for number, table in enumerate(schema.tables)}
        self._initial = InitialRows(schema, source.decay)

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = False) -> Self:
        """The rows in the files of an export, memory-mapped.

        Args:
            folder: of the export.
            verify: compare checksums, which reads all rows once.

        Raises:
            InputError: it is no whole export, or its rows are in a store.
        """
        from bagpipe.serving.file_rows import FileRows

        return cls(FileRows(Path(folder), verify=verify))

    @classmethod
    def connect(cls, url: str, *, namespace: str, timeout_s: float = 5.0, expected: RowSchema | None = None) -> Self:
        """The rows in the store of a job, as they are when they are read.

        Args:
            url: `store.url` of the job.
            namespace: `store.namespace` of the job.
            timeout_s: deadline of one read, and of every connection attempt.
            expected: schema that the rows must have; None: any.

        Raises:
            InputError: an unusable URL or server, or a namespace without rows or of another model.
        """
        from bagpipe.serving.live_rows import LiveRows

        return cls(LiveRows(url, namespace=namespace, timeout_s=timeout_s, expected=expected))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, ids: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        """Vectors ``[n, dim]`` by table, in the order of the ids; of all tables in one exchange with a store.

        An id without a row has the vector that the job would begin with, or what `RowTable.absent` says.

        Args:
            ids: int64 ``[n]`` by table, any order, repeated or not; as the model saw them (see `hashed`).

        Raises:
            InputError: an unknown table, an array of another type, or an id outside its table.
            StoreError: the store failed. The next call connects anew.
        """
        names = list(ids)
        unique, inverse = [], []
        for name in names:
            self._check(name, ids[name])
            distinct, positions = np.unique(ids[name], return_inverse=True)
            unique.append(distinct)
            inverse.append(positions)
        requests = [(self._numbers[name], distinct) for name, distinct in zip(names, unique, strict=True)]
        vectors = {}
        for name, request, positions, (values, found) in zip(
            names, requests, inverse, self._source.read(requests), strict=True
        ):
            table, distinct = request
            if not found.all():
                values[~found] = self._absent(table, distinct[~found])
            vectors[name] = values[positions]
        return vectors

    def read_fp16(self, ids: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[np.float16]]:
        """See `read`; in half the bytes, rounded to nearest."""
        return {name: values.astype(np.float16) for name, values in self.read(ids).items()}

    def read_int8(self, ids: Mapping[str, NDArray[np.int64]]) -> dict[str, CodedRows]:
        """See `read`; in 8 bits a weight, with a scale and an offset for each row."""
        return {name: code_rows(values) for name, values in self.read(ids).items()}

    def hashed(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of raw ids in a table whose schema says ``hash = true``, as the reader maps them.

        Raises:
            InputError: an unknown table, or one without a number of rows.
        """
        rows = self._table(table).rows
        if rows is None:
            raise InputError(f"table {table!r} takes any id: expected one with a number of rows to hash into")
        return hash_ids(np.ascontiguousarray(ids, np.int64), rows)

    def ping(self) -> None:
        """Check that the store answers and still has this schema; with files, nothing.

        Raises:
            StoreError: it does not.
        """
        self._source.ping()

    def close(self) -> None:
        """Close the connections."""
        self._source.close()

    def _absent(self, table: int, ids: NDArray[np.int64]) -> NDArray[Any]:
        """``[n, dim]``, or one row of it: the vectors of ids without a row."""
        own = self._source.schema.tables[table]
        if own.absent == "zero":
            return np.zeros((1, own.dim), self.dtype)
        if own.default_id is not None:
            default = np.array([own.default_id], dtype=np.int64)
            ((values, found),) = self._source.read([(table, default)])
            if found.all():
                return values
        return self._initial.weights(table, ids)

    def _table(self, name: str) -> ServedTable:
        if name not in self.tables:
            raise InputError(f"no table {name!r}: expected one of {', '.join(self.tables)}")
        return self.tables[name]

    def _check(self, name: str, ids: NDArray[np.int64]) -> None:
        rows = self._table(name).rows
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise InputError(f"ids of table {name!r} must be an int64 array [n], got {got}")
        if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            outside = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InputError(f"table {name!r} has rows 0 to {rows - 1}, got id {outside}")
