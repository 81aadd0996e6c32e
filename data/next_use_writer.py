"""Annotates columnar files with next uses: `python -m data convert … --next-use`.

    files ──blocks in the order of training──> NextUseSort.add          once per epoch of a shuffled order
    NextUseSort.solve                                                   in bounded memory, on disk
    files ──groups in the order of the files──> + columns of distances ──> annotated files, NextUseMark in each

The order is that of `BlockOrder`, which training uses, so it is the same by construction.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema
from bagpipe.util.outputs import cannot_write
from bagpipe.util.temporary_folder import temporary_folder
from data.batcher import BlockOrder
from data.columnar_writer import WrittenFile, as_lists, as_scalars, open_writer, write_columnar
from data.next_use_mark import NextUseMark, schema_digest
from data.next_use_sort import ENTRY_BYTES, FAR, NextUseSort, groups_for
from data.parquet import ParquetSource
from data.row_order import Position, RowIndex, row_permutation, split
from data.source import Block, Source
from data.worker import ReadTask

__all__ = ["LEAST_MEMORY", "NextUseOrder", "annotate", "write_annotated"]

#: What a conversion takes beside the sort: the interpreter, blocks that are read and written, and their columns.
BASE_BYTES = 448 << 20
#: Least memory of an annotation.
LEAST_MEMORY = BASE_BYTES + (64 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextUseOrder:
    """The order of training whose next uses are found, and what that may take.

    Attributes:
        eval_fraction: share of the rows, the last ones, that is not trained.
        seed: of a shuffled order; None: the order of the files.
        epochs: annotated ones of a shuffled order.
        memory_bytes: of the whole program, at least `LEAST_MEMORY`.
        threads: groups of rows that are sorted at a time.
    """

    eval_fraction: float = 0.0
    seed: int | None = None
    epochs: int = 1
    memory_bytes: int = 1 << 30
    threads: int = 1


def write_annotated(source: Source, path: str, order: NextUseOrder, limit: int = 0) -> WrittenFile:
    """As `data.columnar_writer.write_columnar`, with next uses.

    Raises:
        InputError: as there; or too little memory.
    """
    open_writer(path, path, pa.schema([]))  # checks the name; opens nothing
    with _folder_beside(path) as folder:
        plain = os.path.join(folder, "plain.arrow")
        written = write_columnar(source, plain, limit)
        annotate([plain], [path], order)
    return dataclasses.replace(written, num_bytes=os.path.getsize(path))


def annotate(sources: Sequence[str], paths: Sequence[str], order: NextUseOrder) -> None:
    """Write Arrow files of `write_columnar` again, with columns of next uses, as one run.

    Args:
        sources: Arrow files of one schema, in reading order.
        paths: the files to write, ending in .arrow or .parquet. Each appears under its name when complete.
        order: of training.

    Raises:
        InputError: too little memory, no rows, or an output that cannot be written.
    """
    if order.memory_bytes < LEAST_MEMORY:
        raise InputError(f"--memory must be at least {LEAST_MEMORY >> 20} MiB, got {order.memory_bytes >> 20} MiB")
    files = _Files.of(sources)
    index = RowIndex.scan(files.source, files.source.segments(), None)
    trained = split(index.num_rows, order.eval_fraction, "train")
    blocks = BlockOrder(
        source=files.source,
        segments=files.source.segments(),
        row_range=trained,
        index=index,
        seed=order.seed or 0,
        shuffle=order.seed is not None,
        epochs=order.epochs,
    )
    max_entries = (order.memory_bytes - BASE_BYTES) // ENTRY_BYTES
    counts = [count * order.epochs for count in files.count_ids()]
    mark = NextUseMark(
        run=uuid.uuid4().hex,
        file=0,
        num_files=len(sources),
        rows=0,
        num_rows=index.num_rows,
        train_rows=trained.high or 0,
        seed=order.seed,
        epochs=order.epochs,
        layout=dataclasses.replace(files.source, form="parquet").layout,
        schema=schema_digest(files.source.schema),
    )
    with (
        _folder_beside(paths[0]) as folder,
        NextUseSort(
            [groups_for(count, max_entries // order.threads) for count in counts],
            max_entries=max_entries,
            threads=order.threads,
            folder=folder,
        ) as sort,
    ):
        try:
            places = _add_all(files, blocks, sort)
            sort.solve(cyclic=order.seed is None)
        except OSError as error:
            raise cannot_write(paths[0], error) from None
        for number, path in enumerate(paths):
            _write_file(files, number, path, dataclasses.replace(mark, file=number), sort, places)


@contextmanager
def _folder_beside(path: str) -> Iterator[Path]:
    """A temporary folder on the disk of a file."""
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(temporary_folder("next-use", Path(path).parent))
        except OSError as error:
            raise cannot_write(path, error) from None
        yield folder


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A block as it was added: its number in the sort, and the position of each of its rows, -1 for those left out."""

    number: int
    positions: NDArray[np.int64] | None


#: By file, group, first row, and epoch.
_Places = Mapping[tuple[str, int, int, int], _Part]


def _add_all(files: _Files, blocks: BlockOrder, sort: NextUseSort) -> _Places:
    places: dict[tuple[str, int, int, int], _Part] = {}
    for epoch in range(blocks.epochs):
        for task in filter(None, blocks.tasks(Position(epoch=epoch))):
            block, (positions, count) = task.block, _positions(task, blocks)
            part = _Part(len(places), positions)
            sort.add(files.uses(files.rows(block), positions).tables, count)
            places[block.file, block.group, block.start, epoch] = part
    return places


def _positions(task: ReadTask, blocks: BlockOrder) -> tuple[NDArray[np.int64] | None, int]:
    """The position of each row among those that are served, -1 for others, None: all in order; and their number."""
    rows = task.block.num_rows or 0
    assert task.first_row is not None, "the rows are counted"
    low, high = blocks.row_range.within(task.first_row, rows)
    if task.shuffle is None and (low, high) == (0, rows):
        return None, rows
    positions = np.full(rows, -1, dtype=np.int64)
    if task.shuffle is None:
        positions[low:high] = np.arange(high - low)
    else:
        how = task.shuffle
        served = row_permutation(high - low, how.seed, how.epoch, how.segment, task.number)
        positions[low + served] = np.arange(high - low)
    return positions, high - low


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """The ids of some rows.

    Attributes:
        tables: by table, ids and the example of each, in the order of the examples.
        order: by table, which occurrences these are; None: all in order.
        lengths: by feature, int32 per row.
    """

    tables: list[tuple[NDArray[np.int64], NDArray[np.uint32]]]
    order: list[NDArray[np.int64] | None]
    lengths: list[NDArray[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class _Files:
    """The files to annotate. They are read, not mapped, so that their pages do not count as memory of the program.

    Attributes:
        source: of the files.
        readers: of the id columns, by file.
    """

    source: ParquetSource
    readers: Mapping[str, pa.ipc.RecordBatchFileReader]

    @classmethod
    def of(cls, paths: Sequence[str]) -> _Files:
        source = ParquetSource.of(tuple(paths))
        ids = {column.name for column in source.rules.columns}
        readers = {}
        for path in paths:
            names = pa.ipc.open_file(pa.OSFile(path)).schema.names
            options = pa.ipc.IpcReadOptions(included_fields=[n for n, name in enumerate(names) if name in ids])
            readers[path] = pa.ipc.open_file(pa.OSFile(path), options=options)
        return cls(source, readers)

    @property
    def schema(self) -> DataSchema:
        return self.source.schema

    @property
    def names(self) -> list[str]:
        """Of the id columns, by feature."""
        return [column.name for column in self.source.rules.columns]

    def rows(self, block: Block) -> pa.RecordBatch:
        """The rows of a block."""
        return self.readers[block.file].get_batch(block.group).slice(block.start, block.stop - block.start)

    def count_ids(self) -> list[int]:
        """By table: its ids in all files."""
        counts = dict.fromkeys((table.name for table in self.schema.tables), 0)
        for reader in self.readers.values():
            for group in range(reader.num_record_batches):
                rows = reader.get_batch(group)
                for feature, name in zip(self.schema.features, self.names, strict=True):
                    counts[feature.table] += len(_flat(rows.column(name)))
        return list(counts.values())

    def uses(self, rows: pa.RecordBatch, positions: NDArray[np.int64] | None) -> _Uses:
        """The ids of rows by table; `positions`: of each row among the examples, see `_positions`."""
        ids = [_flat(rows.column(name)).to_numpy(zero_copy_only=False) for name in self.names]
        lengths = [_lengths(rows.column(name)) for name in self.names]
        tables: list[tuple[NDArray[np.int64], NDArray[np.uint32]]] = []
        orders: list[NDArray[np.int64] | None] = []
        every_row = np.arange(rows.num_rows, dtype=np.uint32)
        for table in self.schema.tables:
            own = [number for number, feature in enumerate(self.schema.features) if feature.table == table.name]
            if not own:
                tables.append((np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32)))
                orders.append(None)
                continue
            of_ids = np.concatenate([ids[number] for number in own]) if len(own) > 1 else ids[own[0]]
            examples = np.concatenate([every_row.repeat(lengths[number]) for number in own])
            order = None
            if positions is not None or len(own) > 1:
                at = examples.astype(np.int64) if positions is None else positions.take(examples)
                # Positions within a block have 16 bits, so the sort is a radix sort.
                served = np.flatnonzero(at >= 0)
                order = served.take(np.argsort(at.take(served).astype(np.uint16), kind="stable"))
                of_ids, examples = of_ids.take(order), at.take(order).astype(np.uint32)
            tables.append((np.ascontiguousarray(of_ids), examples))
            orders.append(order)
        return _Uses(tables, orders, lengths)

    def distances(self, uses: _Uses, part: _Part | None, sort: NextUseSort) -> list[NDArray[np.uint32]]:
        """By feature, uint32: the distances of its ids; `FAR` where rows are left out."""
        by_table = [] if part is None else sort.distances(part.number, uses.tables)
        by_feature: dict[int, NDArray[np.uint32]] = {}
        for number, table in enumerate(self.schema.tables):
            own = [place for place, feature in enumerate(self.schema.features) if feature.table == table.name]
            sizes = [int(uses.lengths[place].sum()) for place in own]
            found = np.full(sum(sizes), FAR, dtype=np.uint32)
            if part is not None:
                order = uses.order[number]
                found[slice(None) if order is None else order] = by_table[number]
            for place, piece in zip(own, np.split(found, np.cumsum(sizes)[:-1]) if own else [], strict=True):
                by_feature[place] = piece
        return [by_feature[place] for place in range(len(self.names))]


def _flat(column: pa.Array) -> pa.Array:
    """All ids of a column."""
    if isinstance(column, pa.ListArray):
        return column.flatten()
    return column.drop_null() if column.null_count else column


def _lengths(column: pa.Array) -> NDArray[np.int32]:
    """int32: ids in each row."""
    if isinstance(column, pa.ListArray):
        found = pc.list_value_length(column).fill_null(0)
    elif column.null_count:
        found = column.is_valid()
    else:
        return np.ones(len(column), dtype=np.int32)
    lengths: NDArray[np.int32] = found.to_numpy(zero_copy_only=False).astype(np.int32)
    return lengths


def _write_file(files: _Files, number: int, path: str, mark: NextUseMark, sort: NextUseSort, places: _Places) -> None:
    """Write one annotated file."""
    name = files.source.paths[number]
    reader = pa.ipc.open_file(pa.OSFile(name))
    segments = [segment for segment in files.source.segments() if segment.file == name]
    mark = dataclasses.replace(mark, rows=sum(segment.num_rows or 0 for segment in segments))
    added = []
    for epoch in range(mark.epochs):
        for column in files.names:
            is_list = isinstance(reader.schema.field(column).type, pa.ListType)
            added.append(pa.field(mark.column(column, epoch), pa.list_(pa.uint32()) if is_list else pa.uint32()))
    schema = pa.schema([*reader.schema, *added], metadata={**(reader.schema.metadata or {}), **mark.metadata()})
    partial = f"{path}.partial"
    try:
        with open_writer(path, partial, schema, [field.name for field in added]) as write:
            for group, segment in enumerate(segments):
                rows = reader.get_batch(group)
                columns = _columns(files, rows, list(files.source.blocks(segment)), mark, sort, places)
                write(pa.record_batch([*rows.columns, *columns], schema=schema))
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        Path(partial).unlink(missing_ok=True)


def _columns(
    files: _Files, rows: pa.RecordBatch, blocks: Sequence[Block], mark: NextUseMark, sort: NextUseSort, places: _Places
) -> Iterator[pa.Array]:
    """The added columns of the rows of a group, which consists of these blocks."""
    for epoch in range(mark.epochs):
        pieces = []
        lengths = []
        for block in blocks:
            part = places.get((block.file, block.group, block.start, epoch))
            own = rows.slice(block.start, block.stop - block.start)
            uses = files.uses(own, None if part is None else part.positions)
            pieces.append(files.distances(uses, part, sort))
            lengths.append(uses.lengths)
        for number, feature in enumerate(files.schema.features):
            shape = as_lists if feature.name in files.source.multi_hot else as_scalars
            yield shape(
                np.concatenate([piece[number] for piece in pieces]), np.concatenate([one[number] for one in lengths])
            )
