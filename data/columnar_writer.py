"""Writes any source as a self-describing Arrow IPC or parquet file: the columnar form.

    read_checked(source, block) ──> Columns ──> Arrow record batch of about 65,536 rows ──> file.arrow | file.parquet

`.arrow` is uncompressed and memory-mapped: the fastest to read, about as large as the text. `.parquet` is dictionary
encoded, with a checksum in every page: about a quarter of the size, half as fast. The format `parquet` reads both
without a schema file and gives the same batches bit for bit. Ids of hashed tables are stored hashed. Skipped bad rows
are not stored. Times, if the source reads them, are a column of timestamps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bagpipe.errors import InputError
from bagpipe.util.outputs import written_whole
from bagpipe.util.process_pool import check_interrupt
from data.arrow_files import embed_schema
from data.arrow_numbers import is_list
from data.bad_row_limit import BadRowLimit
from data.checked_read import read_checked
from data.clock import Clock, clock_of
from data.column_rules import target_columns
from data.columns import RowSlice, bag_starts, join
from data.schema_file import SchemaFile
from data.source import Segment, Source

__all__ = ["WrittenFile", "as_lists", "as_scalars", "open_writer", "write_columnar"]

Writer = Callable[[pa.RecordBatch], None]

#: Minimum rows of a record batch or row group (except the last): a block of the reader.
GROUP_ROWS = 65_536

#: Of the column of times. Parquet stores it in milliseconds.
TIME_TYPE = pa.timestamp("s", tz="UTC")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """Result of a write: good rows, skipped malformed rows, bytes of the file."""

    rows: int
    skipped: int
    num_bytes: int


def write_columnar(source: Source, path: str, limit: int = 0, segments: Sequence[Segment] | None = None) -> WrittenFile:
    """Write the first `limit` raw rows (0: all) of a source, or of some of its segments. The file appears under its
    name when complete.

    Raises:
        InputError: bad input rows under the stop policy, a name that ends in neither .arrow nor .parquet, several ids
            of a feature that the source says has one, or a column that has several uses.
    """
    names = {feature.name: f"{feature.name}.weight" for feature in source.schema.features if feature.weighted}
    tables = tuple(dataclasses.replace(table, hash=False) for table in source.schema.tables)
    schema = dataclasses.replace(source.schema, tables=tables)
    stored = SchemaFile(schema=schema, weights=names, clock=_stored_clock(source, names))
    form = _arrow_schema(source, stored)
    rows = skipped = 0
    with written_whole(path) as partial, open_writer(path, partial, form) as write:
        for group, bad in _groups(source, source.segments() if segments is None else segments, limit):
            skipped += bad
            if sum(map(len, group)):
                write(_record_batch(source, form, group))
                rows += sum(map(len, group))
    return WrittenFile(rows=rows, skipped=skipped, num_bytes=os.path.getsize(path))


def open_writer(
    path: str, partial: str, schema: pa.Schema, plain: Collection[str] = ()
) -> contextlib.AbstractContextManager[Writer]:
    """A writer of record batches.

    Args:
        path: name of the whole file, which tells its form.
        partial: the file to write.
        schema: of the batches.
        plain: columns that no dictionary makes smaller.

    Raises:
        InputError: the name ends in neither .arrow nor .parquet.
    """
    opener = _WRITERS.get(Path(path).suffix)
    if opener is None:
        raise InputError(f"expected a file name ending in {' or '.join(_WRITERS)}, got {path!r}")
    return opener(partial, schema, plain)


def _groups(source: Source, segments: Sequence[Segment], limit: int) -> Iterator[tuple[list[RowSlice], int]]:
    """Whole blocks collected into groups, each with the number of its skipped rows."""
    group: list[RowSlice] = []
    raw_rows = skipped = 0
    limits = BadRowLimit(source)
    for block in (block for segment in segments for block in source.blocks(segment)):
        check_interrupt()
        columns = read_checked(source, block)
        limits.check(block, columns.num_raw_rows, columns.bad_rows)
        used = min(columns.num_raw_rows, limit - raw_rows) if limit else columns.num_raw_rows
        bad = int(np.searchsorted(columns.bad_rows, used))
        group.append(RowSlice(columns, bag_starts(columns.lengths), 0, used - bad))
        skipped += bad
        raw_rows += used
        if sum(map(len, group)) >= GROUP_ROWS:
            yield group, skipped
            group, skipped = [], 0
        if limit and raw_rows == limit:
            break
    if group:
        yield group, skipped


def _stored_clock(source: Source, weights: Mapping[str, str]) -> Clock | None:
    """The clock of the file: that of the source, with ``.time`` after its name if another column has that name."""
    clock = clock_of(source)
    if clock is None:
        return None
    features = [feature.name for feature in source.schema.features]
    taken = {*target_columns(source.schema), *source.schema.dense, *features, *weights.values()}
    name = clock.name
    while name in taken:
        name += ".time"
    return Clock(name=name)


def _arrow_schema(source: Source, stored: SchemaFile) -> pa.Schema:
    multi_hot = source.multi_hot
    fields = [pa.field(name, pa.float32()) for name in target_columns(stored.schema)]
    fields += [pa.field(name, pa.float32()) for name in stored.schema.dense]
    for feature in stored.schema.features:
        multi = feature.name in multi_hot
        fields.append(pa.field(feature.name, pa.list_(pa.int64()) if multi else pa.int64()))
        if feature.weighted:
            kind = pa.list_(pa.float32()) if multi else pa.float32()
            fields.append(pa.field(stored.weights[feature.name], kind))
    if stored.clock is not None:
        fields.append(pa.field(stored.clock.name, TIME_TYPE))
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"column {name!r} has {names.count(name)} uses in the schema, and a converted file has it for one: "
                "name it once among label, example_weight, dense, sparse and weights"
            )
    return pa.schema(fields, metadata=embed_schema(stored))


def _record_batch(source: Source, schema: pa.Schema, group: list[RowSlice]) -> pa.RecordBatch:
    batch = join(0, group)
    labels = batch.labels.reshape(batch.num_examples, -1)
    columns = [pa.array(np.ascontiguousarray(labels[:, number])) for number in range(labels.shape[1])]
    if batch.example_weights is not None:
        columns.append(pa.array(batch.example_weights))
    columns += [pa.array(np.ascontiguousarray(batch.dense[:, number])) for number in range(batch.dense.shape[1])]
    offsets = batch.feature_offsets()
    for number, feature in enumerate(source.schema.features):
        part = slice(int(offsets[number]), int(offsets[number + 1]))
        shape = as_lists if is_list(schema.field(feature.name).type) else as_scalars
        if shape is as_scalars and int(batch.lengths[number].max(initial=0)) > 1:
            raise InputError(
                f"feature {feature.name!r}: expected at most one id a row, because the reader's multi_hot does not "
                f"name it, got {batch.lengths[number].max()}"
            )
        columns.append(shape(batch.values[part], batch.lengths[number]))
        if feature.weighted and batch.weights is not None:
            columns.append(shape(batch.weights[part], batch.lengths[number]))
    if batch.times_s is not None:
        columns.append(pa.array(batch.times_s).cast(TIME_TYPE))
    return pa.record_batch(columns, schema=schema)


def as_lists(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """A column of lists: `lengths` of the values for each row."""
    bounds = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return pa.ListArray.from_arrays(pa.array(bounds), pa.array(values))


def as_scalars(values: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """A column of single values: null where the length is 0; no length is above 1."""
    if values.size == lengths.size:
        return pa.array(values)
    spread = np.zeros(lengths.size, values.dtype)
    spread[lengths > 0] = values
    return pa.array(spread, mask=lengths == 0)


@contextlib.contextmanager
def _ipc_writer(path: str, schema: pa.Schema, plain: Collection[str]) -> Iterator[Writer]:
    del plain  # no column has a dictionary
    with pa.OSFile(os.fsencode(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        yield writer.write_batch


@contextlib.contextmanager
def _parquet_writer(path: str, schema: pa.Schema, plain: Collection[str]) -> Iterator[Writer]:
    coded: bool | list[str] = [name for name in schema.names if name not in plain] if plain else True
    options = {"compression": "none", "write_page_checksum": True, "use_dictionary": coded}
    with pa.OSFile(os.fsencode(path), "wb") as sink, pq.ParquetWriter(sink, schema, **options) as writer:
        yield lambda batch: writer.write_batch(batch, row_group_size=batch.num_rows)


_WRITERS: dict[str, Callable[[str, pa.Schema, Collection[str]], contextlib.AbstractContextManager[Writer]]] = {
    ".arrow": _ipc_writer,
    ".parquet": _parquet_writer,
}
