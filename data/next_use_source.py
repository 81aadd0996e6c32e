"""`told_source`: a source of annotated files that reads their next uses, after checks of what they are of.

    files, data section, seed ──NextUseMark of each──> ParquetSource with `next_uses` | None: not annotated

Next uses only order evictions, so wrong ones cost reads, never a value. What would make all of them wrong is refused.
"""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.arrow_files import open_arrow
from data.next_use_mark import NextUseMark, schema_digest
from data.parquet import ParquetSource
from data.row_order import split
from data.source import Source

__all__ = ["told_source"]


def told_source(source: Source, config: DataConfig, seed: int) -> ParquetSource | None:
    """The source with the next uses of its rows; None: its files are not annotated.

    Args:
        source: of the training files.
        config: the `data` section.
        seed: of the order.

    Raises:
        InputError: the annotation is not whole, or of other files, columns or another order.
    """
    if not isinstance(source, ParquetSource):
        return None
    marks: list[NextUseMark | None] = []
    for path in source.paths:
        file = open_arrow(path)
        mark = NextUseMark.of(path, file.schema.metadata)
        if mark is not None:
            _check_file(path, mark, source, file.schema, sum(file.group_rows))
        marks.append(mark)
    first = next((mark for mark in marks if mark is not None), None)
    if first is None:
        return None
    for path, mark in zip(source.paths, marks, strict=True):
        if mark is None:
            raise InputError(f"{path}: the file is not annotated with next uses, but others of data.path are")
        if mark.run != first.run:
            raise InputError(
                f"{path}: the next uses are of another run of convert than those of other files of data.path: convert "
                f"all at once"
            )
    for number, (path, mark) in enumerate(zip(source.paths, marks, strict=True)):
        if mark is not None and (mark.file != number or mark.num_files != len(source.paths)):
            raise InputError(
                f"{path}: this is file {mark.file + 1} of {mark.num_files} annotated ones, got it as file {number + 1} "
                f"of {len(source.paths)}"
            )
    _check_order(source.paths[0], first, source, config, seed)
    return dataclasses.replace(source, next_uses=first)


def _check_file(path: str, mark: NextUseMark, source: ParquetSource, table: pa.Schema, rows: int) -> None:
    if mark.rows != rows:
        raise InputError(f"{path}: the next uses are of {mark.rows} rows, the file has {rows}: convert it again")
    if mark.schema != schema_digest(source.schema):
        raise InputError(f"{path}: the next uses are of other features or tables than those of data.schema")
    for column in source.rules.columns:
        for epoch in range(mark.epochs):
            name = mark.column(column.name, epoch)
            place = table.get_field_index(name)
            kind = table.field(place).type if place >= 0 else None
            if kind is None or pa.uint32() not in (kind, getattr(kind, "value_type", None)):
                raise InputError(f"{path}: expected next uses (uint32) in column {name!r}, got {kind or 'none'}")


def _check_order(path: str, mark: NextUseMark, source: ParquetSource, config: DataConfig, seed: int) -> None:
    """Raise InputError unless training reads the rows in the annotated order."""
    if not mark.is_shuffled:
        if config.shuffle:
            raise InputError(
                f"{path}: the next uses are of the order of the file, data.shuffle is on: convert with --shuffle-seed"
            )
        return
    if not config.shuffle:
        raise InputError(f"{path}: the next uses are of a shuffled order, data.shuffle is off")
    if config.shuffle_buffer:
        raise InputError(f"{path}: next uses are of orders without data.shuffle_buffer, got {config.shuffle_buffer}")
    rows = split(min(config.limit or mark.num_rows, mark.num_rows), config.eval_fraction, "train").high
    for what, annotated, now in (
        ("run.seed", mark.seed, seed),
        ("the layout of blocks", mark.layout, source.layout),
        ("rows of an epoch (data.limit, data.eval_fraction)", mark.train_rows, rows),
    ):
        if annotated != now:
            raise InputError(f"{path}: the next uses are of another order: {what} was {annotated}, is {now}")
    if config.epochs > mark.epochs:
        raise InputError(f"{path}: next uses are of {mark.epochs} shuffled epochs, data.epochs is {config.epochs}")
