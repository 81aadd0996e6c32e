"""Reader of parquet and Arrow IPC files: scalar and list columns named by a schema TOML or by the file itself.

    row group ──pyarrow──> Arrow columns ──no copy where possible──> values, lengths, dense, labels ──checks──> Columns

A null id or list is an empty bag, a null dense value 0; dense values are not transformed. A row is bad if its label is
null, a dense value is not finite, an id lies outside its table, a list holds a null, or the numbers of ids and weights
differ (and `data.checked_read` checks its label). Rows are numbered from 0 within their file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature
from data.arrow_files import cached_group, embedded_schema, open_arrow
from data.columns import Columns, take_rows
from data.hashing import first_out_of_range, hash_ids
from data.schema_file import SchemaFile, parse_schema, read_schema_file
from data.source import Block, Segment, file_version
from data.text_files import list_files

__all__ = ["ParquetSource"]

#: Most rows in a block: with 26 ids and 13 dense values about 24 MB of columns.
BLOCK_ROWS = 65_536

_SUFFIXES = (".parquet", ".arrow", ".feather")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource:
    """Columnar files of one schema.

    Attributes:
        files: paths in reading order.
        schema: columns.
        weights: (feature, weight column) pairs.
        multi_hot: features read from list columns.
        bad_rows: stop or skip.
        block_rows: most rows in a block.
    """

    files: tuple[str, ...]
    schema: DataSchema
    weights: tuple[tuple[str, str], ...] = ()
    multi_hot: frozenset[str] = frozenset()
    bad_rows: str = "stop"
    block_rows: int = BLOCK_ROWS

    @classmethod
    def at(
        cls, path: str, *, schema_path: str = "", bad_rows: str = "stop", block_rows: int = BLOCK_ROWS
    ) -> ParquetSource:
        """The source of a file or folder; without a schema TOML the first file must hold its schema.

        Raises:
            InputError: no file, no schema, or a column that is missing or of an unsupported type.
        """
        files = list_files(path, _SUFFIXES)
        first = open_arrow(files[0])
        if schema_path:
            found: SchemaFile | None = parse_schema(schema_path, read_schema_file(schema_path))
        else:
            found = embedded_schema(files[0], first.schema)
        if found is None:
            raise InputError(f"{files[0]}: the file carries no schema of its own: name the columns with data.schema")
        multi_hot = {
            item.name for item in found.schema.features if _is_list(_column_type(files[0], first.schema, item.name))
        }
        source = cls(
            files=files,
            schema=found.schema,
            weights=tuple(found.weights.items()),
            multi_hot=frozenset(multi_hot),
            bad_rows=bad_rows,
            block_rows=block_rows,
        )
        source.check_columns(files[0], first.schema)
        return source

    @property
    def in_processes(self) -> bool:
        return False  # pyarrow decodes outside the interpreter lock

    @property
    def layout(self) -> str:
        return f"parquet/{self.block_rows}"

    def check_columns(self, path: str, schema: pa.Schema) -> None:
        """Raise InputError unless the file has every column, in a supported type."""
        for name in (self.schema.label, *self.schema.dense):
            kind = _column_type(path, schema, name)
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise InputError(f"{path}: column {name!r}: expected numbers, got {kind}")
        for feature in self.schema.features:
            kind = _column_type(path, schema, feature.name)
            if not pa.types.is_integer(_element(kind)):
                raise InputError(
                    f"{path}: column {feature.name!r}: expected integer ids (or lists of them), got {kind}: "
                    f"turn them into integers first"
                )
        for feature_name, name in self.weights:
            kind = _column_type(path, schema, name)
            if not pa.types.is_floating(_element(kind)) or _is_list(kind) != (feature_name in self.multi_hot):
                raise InputError(
                    f"{path}: column {name!r}: expected floating-point weights shaped like the ids "
                    f"of {feature_name!r}, got {kind}"
                )

    def segments(self) -> tuple[Segment, ...]:
        found = []
        for path in self.files:
            file = open_arrow(path)
            self.check_columns(path, file.schema)
            for group, rows in enumerate(file.group_rows):
                found.append(Segment(file=path, start=group, stop=group + 1, num_rows=rows))
        if not sum(segment.num_rows or 0 for segment in found):
            raise InputError(f"{self.files[0]}: the file holds no rows")
        return tuple(found)

    def blocks(self, segment: Segment) -> Iterator[Block]:
        rows = segment.num_rows or 0
        for start in range(0, rows, self.block_rows):
            stop = min(start + self.block_rows, rows)
            yield Block(file=segment.file, group=segment.start, start=start, stop=stop, num_rows=stop - start)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return segment.num_rows or 0

    def locate(self, block: Block, row: int) -> str:
        before = sum(open_arrow(block.file).group_rows[: block.group]) + block.start
        return f"{block.file}: row {before + row} (from 0)"

    def read(self, block: Block) -> Columns:
        names = [self.schema.label, *self.schema.dense, *(item.name for item in self.schema.features)]
        names += [name for _, name in self.weights]
        try:
            version = file_version(block.file)
        except OSError as error:
            raise InputError(f"cannot read {block.file}: {error.strerror or error}") from None
        group = cached_group(block.file, version, block.group, tuple(dict.fromkeys(names)))
        table = group.slice(block.start, block.stop - block.start)
        if table.num_rows != block.stop - block.start:
            raise InputError(
                f"{block.file}: row group {block.group}: expected {block.stop} rows, got {group.num_rows}: "
                f"the file changed while it was read"
            )
        return _BlockReader(source=self, block=block, table=table).columns()


def _column_type(path: str, schema: pa.Schema, name: str) -> pa.DataType:
    if schema.get_field_index(name) < 0:
        raise InputError(f"{path}: column {name!r} is missing, the file has: {', '.join(schema.names)}")
    return schema.field(name).type


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if _is_list(kind) else kind


def _single(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


@dataclass(slots=True, kw_only=True)
class _BlockReader:
    """Converts one block to `Columns`.

    `problems` collects (ascending bad rows of the block, explanation for the first of them).
    """

    source: ParquetSource
    block: Block
    table: pa.Table
    problems: list[tuple[NDArray[np.int64], str]] = field(default_factory=list)

    def columns(self) -> Columns:
        schema, rows = self.source.schema, self.table.num_rows
        labels = self._labels()
        dense = np.empty((rows, len(schema.dense)), np.float32)
        for number, name in enumerate(schema.dense):
            dense[:, number] = self._dense(name)
        lengths = np.empty((len(schema.features), rows), np.int32)
        values, weights = [], []
        for number, feature in enumerate(schema.features):
            ids = self._ids(feature, lengths[number])
            values.append(ids)
            if self.source.weights:
                weights.append(self._weights(feature, ids.size, lengths[number]))
        bad = (
            np.unique(np.concatenate([rows_ for rows_, _ in self.problems])) if self.problems else np.zeros(0, np.int64)
        )
        if bad.size and self.source.bad_rows == "stop":
            raise self._error(int(bad[0]))
        columns = Columns(
            labels=labels,
            dense=dense,
            values=np.concatenate(values),
            lengths=lengths,
            weights=np.concatenate(weights) if weights else None,
            num_raw_rows=rows,
            bad_rows=bad,
        )
        return take_rows(columns, np.setdiff1d(np.arange(rows), bad)) if bad.size else columns

    def _error(self, row: int) -> InputError:
        reason = next(reason for rows, reason in self.problems if rows[0] == row)
        return InputError(f"{self.source.locate(self.block, row)}: {reason}")

    def _labels(self) -> NDArray[np.float32]:
        name = self.source.schema.label
        array = _single(self.table.column(name))
        if array.null_count:
            rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            self.problems.append((rows, f"expected a number in column {name!r}, got null"))
        return _to_float32(array)

    def _dense(self, name: str) -> NDArray[np.float32]:
        numbers = _to_float32(_single(self.table.column(name)))
        finite = np.isfinite(numbers)
        if not finite.all():
            rows = np.flatnonzero(~finite)
            self.problems.append((rows, f"expected a finite number in column {name!r}, got nan or infinity"))
        return numbers

    def _ids(self, feature: Feature, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Ids of one feature; writes its lengths to `lengths`."""
        array = _single(self.table.column(feature.name))
        if _is_list(array.type):
            lengths[:] = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
            array = array.flatten()
            if array.null_count:
                nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
                self.problems.append(
                    (_row_of(lengths, nulls), f"expected ids in column {feature.name!r}, got a list with null")
                )
                array = array.fill_null(0)
        elif array.null_count:
            lengths[:] = array.is_valid().to_numpy(zero_copy_only=False)
            array = array.drop_null()
        else:
            lengths[:] = 1
        ids: NDArray[np.int64] = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        table = self.source.schema.table(feature.table)
        if table.hash and table.rows is not None:
            return hash_ids(np.ascontiguousarray(ids), table.rows)
        if first_out_of_range(ids, table) is not None and table.rows is not None:
            outside = np.flatnonzero((ids < 0) | (ids >= table.rows))
            reason = f"expected ids of table {table.name!r} in [0, {table.rows}), got {ids[outside[0]]}"
            self.problems.append((np.unique(_row_of(lengths, outside)), reason))
        return ids

    def _weights(self, feature: Feature, num_ids: int, lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        name = dict(self.source.weights).get(feature.name)
        if name is None:
            return np.ones(num_ids, np.float32)
        array = _single(self.table.column(name))
        if _is_list(array.type):
            counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
            array = array.flatten()
        else:
            counts = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int32)
            array = array.drop_null()
        weights: NDArray[np.float32] = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        differ = np.flatnonzero(counts != lengths)
        if differ.size:
            reason = f"expected as many weights in {name!r} as ids in {feature.name!r}, got another number"
            self.problems.append((differ, reason))
            # Bad rows are dropped later; until then the shapes of the arrays must agree.
            return np.ones(num_ids, np.float32) if self.source.bad_rows == "stop" else _refit(weights, counts, lengths)
        finite = np.isfinite(weights)
        if not finite.all():
            rows = _row_of(lengths, np.flatnonzero(~finite))
            self.problems.append((rows, f"expected finite weights in column {name!r}, got nan or infinity"))
        return weights


def _to_float32(array: pa.Array) -> NDArray[np.float32]:
    """Numbers or booleans ``[n]``; null becomes 0, a number beyond float32 infinity."""
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return numbers


def _row_of(lengths: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row within the block of each id position of one feature."""
    return np.searchsorted(np.cumsum(lengths, dtype=np.int64), positions, side="right").astype(np.int64)


def _refit(weights: NDArray[np.float32], counts: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """`weights` with ones in the rows where `counts` and `lengths` differ."""
    fitted = np.ones(int(lengths.sum()), np.float32)
    same = counts == lengths
    fitted[np.repeat(same, lengths)] = weights[np.repeat(same, counts)]
    return fitted
