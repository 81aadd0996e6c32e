"""Tables and rows: which tables of a source fit those of a new job, and their rows as the new job's row files.

    source's tables, row schema ──match_tables──> TablePlan of each table, Takings
    TablePlan ──chunks──> weights, state ──converted──> records ──write_rows──> full row files, one for each width

Rows pass in chunks of a few MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bagpipe.checkpoint.manifest import DATA_COLUMNS, RowFile
from bagpipe.checkpoint.row_file import NAME_DTYPE, RecordFile, file_dtype, words_as
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.row_format import host_words, split_record
from bagpipe.start_from.source import RowChunk, SourceTable
from bagpipe.start_from.takings import Fate, Taking, matches
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH, ROW_TYPES, RowSchema, base_optimizer

__all__ = ["TablePlan", "hashed_tables", "match_tables", "write_rows"]

#: Prefix of the label of an optimizer state.
_STATE = "state."


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """A table whose rows are taken.

    Attributes:
        number: of the table in the new job's schema.
        source: where its rows are.
        takes_state: their optimizer state is taken, too; otherwise it begins at zero.
    """

    number: int
    source: SourceTable
    takes_state: bool


def hashed_tables(settings: Mapping[str, Any]) -> dict[str, int]:
    """Tables whose ids the reader hashes, with their numbers of rows, by the settings of a job."""
    columns = settings.get(DATA_COLUMNS) or {}
    return {table["name"]: table["rows"] for table in columns.get("tables", ()) if table.get("hash")}


def match_tables(
    tables: Mapping[str, SourceTable], schema: RowSchema, hashed: Mapping[str, int], without: Sequence[str]
) -> tuple[list[TablePlan], list[Taking]]:
    """Compare the tables of a source with those of a new job.

    Args:
        tables: of the source, by name.
        schema: of the new job's rows.
        hashed: its `hashed_tables`.
        without: see `checkpoint.start_without`.
    """
    plans: list[TablePlan] = []
    items: list[Taking] = []
    for number, table in enumerate(schema.tables):
        source = tables.get(table.name)
        label = f"rows.{table.name}"
        optimizer, _ = base_optimizer(schema.optimizer_of(number))
        has_state = bool(OPTIMIZER_STATE_WIDTH[optimizer](1))
        if source is None or matches(label, without):
            why = "not there" if source is None else "left out (checkpoint.start_without)"
            state = f"{optimizer}: new" if has_state else ""
            items.append(Taking(kind="rows", name=table.name, fate=Fate.NEW, detail=why, state=state))
            continue
        problem, detail = _compare(source, schema, number, hashed.get(table.name))
        if problem:
            items.append(Taking(kind="rows", name=table.name, fate=Fate.CLASH, detail=problem))
            continue
        is_same = source.optimizer == optimizer and not matches(_STATE + label, without)
        plans.append(TablePlan(number=number, source=source, takes_state=is_same))
        state = _state_text(source.optimizer, optimizer, takes_state=is_same)
        items.append(Taking(kind="rows", name=table.name, fate=Fate.TAKEN, detail=detail, state=state))
    ours = {table.name for table in schema.tables}
    named = {id(source) for name, source in tables.items() if name in ours}  # one table can have several names
    for name, source in tables.items():
        if id(source) not in named:
            named.add(id(source))
            detail = f"{source.extent().num_rows} rows; this job has no such table"
            items.append(Taking(kind="rows", name=name, fate=Fate.DROPPED, detail=detail))
    return plans, items


def write_rows(
    folder: Path, schema: RowSchema, plans: Sequence[TablePlan], names: RecordFile | None = None
) -> tuple[RowFile, ...]:
    """Write all rows as full row files of step 0.

    Args:
        folder: of the checkpoint; exists.
        schema: of the new job's rows.
        plans: of its tables, in the order of the schema.
        names: gets the names of the rows, too; entered by the caller.

    Raises:
        InputError: a weight is finite in the source and not in the new job's dtype, or the source cannot be read.
        OSError: a file cannot be written.
    """
    files = []
    for row_bytes in sorted({schema.row_bytes(plan.number) for plan in plans}):
        dtype = file_dtype(schema, row_bytes)
        with RecordFile(folder / f"full-{0:08d}-{row_bytes:06d}.npy", dtype) as file:
            for plan in (plan for plan in plans if schema.row_bytes(plan.number) == row_bytes):
                for ids, rows in _converted(plan, schema):
                    records = np.zeros(len(ids), dtype)
                    records["id"], records["table"] = ids, plan.number
                    records["row"] = words_as(rows, dtype["row"].base)
                    file.write(records)
                    if names is not None:
                        names.write(_names(records))
        if file.num_records:
            files.append(RowFile(file=file.entry, row_bytes=row_bytes, num_rows=file.num_records, full=True, step=0))
        else:
            file.path.unlink()
    return tuple(files)


def _names(records: NDArray[Any]) -> NDArray[Any]:
    named = np.empty(len(records), NAME_DTYPE)
    named["table"], named["id"] = records["table"], records["id"]
    return named


def _converted(plan: TablePlan, schema: RowSchema) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Ids and rows of the new job, as words."""
    table, dtype = schema.tables[plan.number], TORCH_DTYPE[schema.dtype_of(plan.number)]
    for chunk in plan.source.chunks():
        records = torch.zeros(len(chunk.ids), schema.row_width(plan.number), dtype=dtype)
        weights, state = split_record(records, schema, table.dim, schema.optimizer_of(plan.number))
        weights.copy_(chunk.weights)
        if not ROW_TYPES[plan.source.dtype].word_bytes <= ROW_TYPES[schema.dtype_of(plan.number)].word_bytes:
            _check_range(chunk, weights, table.name)
        if plan.takes_state and chunk.state is not None:
            state[:, : chunk.state.shape[1]].copy_(chunk.state)  # rows that decay begin at step 0
        yield chunk.ids, host_words(records)


def _check_range(chunk: RowChunk, weights: torch.Tensor, table: str) -> None:
    lost = (~torch.isfinite(weights) & torch.isfinite(chunk.weights)).any(dim=1)
    if bool(lost.any()):
        row = int(chunk.ids[int(lost.nonzero()[0])])
        raise InputError(f"table {table!r}: row {row} has a weight beyond the largest of {weights.dtype}")


def _compare(source: SourceTable, schema: RowSchema, number: int, hashed_rows: int | None) -> tuple[str, str]:
    """The reason why the rows do not fit, empty if they do; and their number and type."""
    table, dtype = schema.tables[number], schema.dtype_of(number)
    if source.dim != table.dim:
        return f"rows of {source.dim} weights there, of {table.dim} here", ""
    if source.hashed_rows != hashed_rows and (source.hashed_rows or hashed_rows) and source.optimizer:
        theirs, ours = (
            f"hashed into {rows} rows" if rows else "not hashed" for rows in (source.hashed_rows, hashed_rows)
        )
        return f"ids are {theirs} there, {ours} here", ""
    extent = source.extent()
    if table.rows is not None and extent.num_rows and not (extent.least >= 0 and extent.largest < table.rows):
        outside = extent.least if extent.least < 0 else extent.largest
        return f"it has row {outside} there, ids are in [0, {table.rows}) here", ""
    detail = f"{extent.num_rows} rows of {table.dim} {source.dtype}"
    if source.dtype != dtype:
        detail += f", as {dtype}"
    return "", detail


def _state_text(theirs: str, ours: str, *, takes_state: bool) -> str:
    width = {name: bool(name) and bool(OPTIMIZER_STATE_WIDTH[name](1)) for name in (theirs, ours)}
    if takes_state:
        return f"{ours}: taken" if width[ours] else ""
    words = [f"{theirs}: dropped"] if width[theirs] else []
    return ", ".join([*words, f"{ours}: new"] if width[ours] else words)
