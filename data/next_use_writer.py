"""Annotates columnar files with next uses: `python -m data convert … --next-use`.

    files ──blocks in the order of training──> NextUseSort.add          once per epoch of a shuffled order
    NextUseSort.solve                                                   in bounded memory, on disk
    files ──groups in the order of the files──> + columns of distances ──> annotated files, NextUseMark in each

The order is that of `BlockOrder`, which training uses, so it is the same by construction. The files depend on the rows
and the order alone, never on memory or threads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.util.map_ahead import map_ahead
from bagpipe.util.outputs import cannot_write, written_whole
from bagpipe.util.temporary_folder import temporary_folder
from data.arrow_numbers import is_list
from data.batcher import BlockOrder
from data.columnar_writer import WrittenFile, as_lists, as_scalars, open_writer, write_columnar
from data.conversion_manifest import PartRecord, record_of
from data.next_use_files import PlainFiles
from data.next_use_mark import NextUseMark, schema_digest
from data.next_use_sort import ENTRY_BYTES, MOST_GROUPS, NextUseSort, groups_for
from data.row_order import Position, RowIndex, row_permutation, split
from data.source import Block, Segment, Source
from data.worker import ReadTask

__all__ = ["LEAST_MEMORY", "NextUseOrder", "annotate", "check_memory", "run_of", "write_annotated"]

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
        threads: blocks that are read, groups of rows that are sorted and files that are written at a time.
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
    check_memory(order)
    with _folder_beside(path) as folder:
        plain = folder / "plain.arrow"
        written = write_columnar(source, str(plain), limit)
        record = record_of(plain, rows=written.rows, skipped=written.skipped)
        for _ in annotate([str(plain)], {0: path}, order, run_of([record], order)):
            pass
    return dataclasses.replace(written, num_bytes=os.path.getsize(path))


def check_memory(order: NextUseOrder) -> None:
    """Raise InputError if the memory is too little for any file."""
    if order.memory_bytes < LEAST_MEMORY:
        raise InputError(f"--memory must be at least {LEAST_MEMORY >> 20} MiB, got {order.memory_bytes >> 20} MiB")


def run_of(plain: Sequence[PartRecord], order: NextUseOrder) -> str:
    """`NextUseMark.run` of these files, not yet annotated: their content and the order decide it."""
    value = [[record.xxh3_64 for record in plain], str(order.eval_fraction), order.seed, order.epochs]
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def annotate(sources: Sequence[str], paths: Mapping[int, str], order: NextUseOrder, run: str) -> Iterator[int]:
    """Write Arrow files of `write_columnar` again, with columns of next uses, as one run.

    Yields the number of each file when it is complete.

    Args:
        sources: Arrow files of one schema, in reading order.
        paths: by number of a source: the file to write, ending in .arrow or .parquet. At least one.
        order: of training.
        run: see `run_of`.

    Raises:
        InputError: too little memory, no rows, or an output that cannot be written.
    """
    check_memory(order)
    files = PlainFiles(sources)
    segments = files.source.segments()
    index = RowIndex.scan(files.source, segments, None)
    blocks = BlockOrder(
        source=files.source,
        segments=segments,
        row_range=split(index.num_rows, order.eval_fraction, "train"),
        index=index,
        seed=order.seed or 0,
        shuffle=order.seed is not None,
        epochs=order.epochs,
    )
    mark = NextUseMark(
        run=run,
        file=0,
        num_files=len(sources),
        rows=0,
        num_rows=index.num_rows,
        train_rows=blocks.row_range.high or 0,
        seed=order.seed,
        epochs=order.epochs,
        layout=dataclasses.replace(files.source, form="parquet").layout,
        schema=schema_digest(files.source.schema),
    )
    folder_of = next(iter(paths.values()))
    with (
        _folder_beside(folder_of) as folder,
        _sort_for(files, order, folder) as sort,
        ThreadPoolExecutor(order.threads, thread_name_prefix="annotate") as pool,
    ):
        told = _Told(files, blocks, mark, sort)
        try:
            told.add_all(pool, order.threads)
            sort.solve(cyclic=order.seed is None)
        except OSError as error:
            raise cannot_write(folder_of, error) from None
        by_file: dict[str, list[Segment]] = {source: [] for source in sources}
        for segment in segments:
            by_file[segment.file].append(segment)
        files_ahead = order.threads if len(paths) > 1 else 0

        def write(number: int) -> int:
            told.write(number, by_file[sources[number]], paths[number], None if files_ahead else (pool, order.threads))
            return number

        yield from map_ahead(pool, write, paths, files_ahead) if files_ahead else map(write, paths)


def _sort_for(files: PlainFiles, order: NextUseOrder, folder: Path) -> NextUseSort:
    """The sort of all ids.

    Raises:
        InputError: there are too many for the memory.
    """
    max_entries = (order.memory_bytes - BASE_BYTES) // ENTRY_BYTES
    counts = [count * order.epochs for count in files.count_ids()]
    most = max(counts) * 2 * order.threads * ENTRY_BYTES // MOST_GROUPS + BASE_BYTES
    if most > order.memory_bytes:
        raise InputError(f"--memory must be at least {-(-most >> 20)} MiB for {max(counts):,} ids of a table")
    return NextUseSort(
        [groups_for(count, max_entries // order.threads) for count in counts],
        max_entries=max_entries,
        threads=order.threads,
        folder=folder,
    )


@contextmanager
def _folder_beside(path: str) -> Iterator[Path]:
    """A temporary folder on the disk of a file."""
    with ExitStack() as opened:
        try:
            folder = opened.enter_context(temporary_folder("next-use", Path(path).parent))
        except OSError as error:
            raise cannot_write(path, error) from None
        yield folder


class _Told:
    """The blocks of all epochs in the sort, and the files that tell what it found."""

    def __init__(self, files: PlainFiles, blocks: BlockOrder, mark: NextUseMark, sort: NextUseSort) -> None:
        self._files = files
        self._blocks = blocks
        self._mark = mark
        self._sort = sort
        # By file, group, first row, and epoch: the number of the block in the sort.
        self._tasks: dict[tuple[str, int, int, int], tuple[int, ReadTask]] = {}

    def add_all(self, pool: ThreadPoolExecutor, ahead: int) -> None:
        """Give all blocks to the sort."""
        for tables, num_examples in map_ahead(pool, self._read, self._all_tasks(), ahead):
            self._sort.add(tables, num_examples)

    def write(
        self, number: int, segments: Sequence[Segment], path: str, ahead: tuple[ThreadPoolExecutor, int] | None
    ) -> None:
        """Write one annotated file.

        Args:
            number: of the file.
            segments: of its rows before.
            path: of the file.
            ahead: threads that make groups of rows while others are written, and how many at a time; None: none.
        """
        source = self._files.source.paths[number]
        own = pa.ipc.open_file(pa.OSFile(os.fsencode(source))).schema
        mark = dataclasses.replace(self._mark, file=number, rows=sum(segment.num_rows or 0 for segment in segments))
        added = []
        for epoch in range(mark.epochs):
            for column in self._files.names:
                kind = pa.list_(pa.uint32()) if is_list(own.field(column).type) else pa.uint32()
                added.append(pa.field(mark.column(column, epoch), kind))
        schema = pa.schema([*own, *added], metadata={**(own.metadata or {}), **mark.metadata()})
        make = partial(self._group, schema)
        names = [field.name for field in added]
        with written_whole(path) as partial_path, open_writer(path, partial_path, schema, names) as write_group:
            for group in map(make, segments) if ahead is None else map_ahead(ahead[0], make, segments, ahead[1]):
                write_group(group)

    def _all_tasks(self) -> Iterator[ReadTask]:
        for epoch in range(self._blocks.epochs):
            for task in filter(None, self._blocks.tasks(Position(epoch=epoch))):
                block = task.block
                self._tasks[block.file, block.group, block.start, epoch] = len(self._tasks), task
                yield task

    def _read(self, task: ReadTask) -> tuple[list[tuple[NDArray[np.int64], NDArray[np.uint32]]], int]:
        """What the sort takes of a block."""
        positions, num_examples = _positions(task, self._blocks)
        return self._files.uses(self._files.rows(task.block), positions).tables, num_examples

    def _group(self, schema: pa.Schema, segment: Segment) -> pa.RecordBatch:
        """The rows of a group with the added columns."""
        rows = self._files.reader(segment.file).get_batch(segment.start)
        blocks = list(self._files.source.blocks(segment))
        return pa.record_batch([*rows.columns, *self._columns(rows, blocks)], schema=schema)

    def _columns(self, rows: pa.RecordBatch, blocks: Sequence[Block]) -> Iterator[pa.Array]:
        """The added columns of the rows of a group, which consists of these blocks."""
        for epoch in range(self._mark.epochs):
            pieces = []
            lengths = []
            for block in blocks:
                number, positions = None, None
                if (found := self._tasks.get((block.file, block.group, block.start, epoch))) is not None:
                    number, (positions, _) = found[0], _positions(found[1], self._blocks)
                uses = self._files.uses(rows.slice(block.start, block.num_rows), positions)
                pieces.append(self._files.distances(uses, number, self._sort))
                lengths.append(uses.lengths)
            for place, column in enumerate(self._files.names):
                shape = as_lists if is_list(rows.schema.field(column).type) else as_scalars
                distances = [piece[place] for piece in pieces]
                yield shape(np.concatenate(distances), np.concatenate([one[place] for one in lengths]))


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
