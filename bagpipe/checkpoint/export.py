"""Export of a checkpoint or a running job as plain tensors: dense weights by the model's names, tables by torchrec's.

dense part ──names of the model's state_dict──> weights ─┐
rows of a bounded table ──initial values, then rows──>    ├──> files of `bagpipe.serving`, or DCP
rows of an unbounded table ──ids, rows──────────────>    ─┘

<collection>.embedding_bags.<table>.weight     [rows, dim]; unbounded: [n, dim], temporary
<collection>.embedding_bags.<table>.ids        int64 [n], ascending
<weight>.<state>                               optimizer state of a weight, by torch's state names
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.row_history import RowHistory
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import MODEL, OPTIM, DenseState, combine, load
from bagpipe.checkpoint.folder import Checkpoint
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE, InitialWeights
from bagpipe.kernels.row_format import split_record
from bagpipe.store.interface import WriteRequest
from bagpipe.types.schema import FROZEN, RowSchema, base_optimizer
from bagpipe.util.outputs import new_folder

__all__ = [
    "FORMATS",
    "ExportTable",
    "Exported",
    "RowSource",
    "add_dense",
    "add_rows",
    "check_size",
    "check_tables",
    "collect",
    "history_of",
    "row_states",
    "write_dcp",
]

FORMATS = ("safetensors", "dcp")

#: States of a row optimizer without decay, as `row_states` gives them.
_ROW_STATES: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "sgd": (),
    "momentum": (("momentum_buffer", False),),
    "adagrad": (("sum", False),),
    "rowwise_adagrad": (("sum", True),),
    "adam": (("exp_avg", False), ("exp_avg_sq", False)),
    "ftrl": (("z", False), ("sum", False)),
    FROZEN: (),
}

#: Rows initialized at a time.
_CHUNK_ROWS = 1 << 16


class RowSource(Protocol):
    """Rows of a checkpoint or a store, by number of the table in the schema."""

    @property
    def schema(self) -> RowSchema: ...

    def num_records_of(self, table: int) -> int: ...

    def ids(self, table: int) -> NDArray[np.int64]: ...

    def rows(self, table: int) -> Iterator[WriteRequest]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTable:
    """Mapping from a table of the row schema to its name in the model.

    Attributes:
        name: full name without ``.weight``: ``sparse_arch.embedding_bag_collection.embedding_bags.<table>``.
        table: its name in the row schema.
        num_rows: rows of the tensor. None: the table is unbounded, and only existing rows are exported.
    """

    name: str
    table: str
    num_rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """Exported tensors by name.

    Attributes:
        weights: dense and embedding weights, and ids of unbounded tables.
        states: optimizer states, named ``<weight>.<state>``.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)


def collect(
    checkpoint: Checkpoint, tables: Sequence[ExportTable], dense: Collection[str], *, max_bytes: int
) -> Exported:
    """Load all tensors of a checkpoint into memory.

    Args:
        checkpoint: a valid checkpoint.
        tables: all tables of its row schema.
        dense: names of the model's dense weights.
        max_bytes: limit on the size of the tables.

    Raises:
        InputError: the checkpoint lacks a weight or table, or exceeds `max_bytes`.
    """
    schema = RowSchema.from_json(checkpoint.manifest.row_schema)
    rows = CheckpointRows(checkpoint.folder, checkpoint.manifest, schema)
    check_tables(schema, tables)
    check_size(rows, tables, max_bytes)
    found = Exported()
    parts = checkpoint.manifest.parts
    if not parts:
        raise InputError(
            f"the checkpoint of step {checkpoint.manifest.step} has no dense part: its job has not trained"
        )
    state = combine(load(checkpoint.folder, part.dense) for part in parts)
    add_dense(state, dense, found)
    add_rows(rows, tables, found, history_of(schema, state))
    return found


def row_states(optimizer: str) -> tuple[tuple[str, bool], ...]:
    """States of a row optimizer in record order: name, and whether the state is a scalar per row.

    Not the step that a row which decays is at: only the job that updated the row has steps of that number.

    Args:
        optimizer: a key of `bagpipe.types.schema.OPTIMIZER_STATE_WIDTH`.
    """
    return _ROW_STATES[base_optimizer(optimizer)[0]]


def history_of(schema: RowSchema, state: DenseState) -> RowHistory:
    """The decay of a checkpoint's rows, which its dense part holds."""
    history = RowHistory(schema, torch.device("cpu"))
    if history.decaying:
        history.load(state.of_part(history.name))
    return history


def add_dense(state: DenseState, names: Collection[str], found: Exported) -> None:
    """Add weights of the dense part, and all optimizer state.

    Args:
        state: on the host.
        names: of the weights.
        found: is added to.

    Raises:
        InputError: the state lacks a weight.
    """
    saved = state.below(MODEL)
    for name in names:
        if name not in saved:
            raise InputError(f"the checkpoint has no {name!r}: it is of another model")
        found.weights[name] = saved[name]
    found.states.update(state.below(OPTIM))


def add_rows(rows: RowSource, tables: Sequence[ExportTable], found: Exported, history: RowHistory) -> None:
    """Add the rows of tables with the decay that they have missed, and their optimizer state.

    Raises:
        InputError: a table has a row beyond its tensor.
    """
    numbers = {table.name: number for number, table in enumerate(rows.schema.tables)}
    for table in tables:
        if table.num_rows is None:
            _collect_unbounded(rows, numbers[table.table], table.name, found, history)
        else:
            _collect_bounded(rows, numbers[table.table], table.name, table.num_rows, found, history)


def check_tables(schema: RowSchema, tables: Sequence[ExportTable]) -> None:
    """Raise InputError unless the tables are those of a schema."""
    known = {table.table for table in tables}
    if known != {table.name for table in schema.tables}:
        raise InputError(
            f"the checkpoint has tables {sorted(table.name for table in schema.tables)}, the model {sorted(known)}"
        )


def check_size(rows: RowSource, tables: Sequence[ExportTable], max_bytes: int) -> None:
    """Raise InputError if the tables' tensors, with optimizer state, take more than `max_bytes`."""
    numbers = {table.name: number for number, table in enumerate(rows.schema.tables)}
    sizes = {}
    for table in tables:
        number = numbers[table.table]
        count = rows.num_records_of(number) if table.num_rows is None else table.num_rows
        sizes[table.table] = count * rows.schema.row_bytes(number)
    total = sum(sizes.values())
    if total > max_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"the tables take {total / 2**30:.1f} GiB of memory, more than --max-gib {max_bytes / 2**30:g} allows "
            f"(the largest is {largest!r} with {sizes[largest] / 2**30:.1f} GiB)"
        )


def write_dcp(exported: Exported, out: Path) -> None:
    """Write a new folder of torch.distributed.checkpoint with keys ``model.…`` and ``optimizer.…``, by a rename.

    Args:
        exported: tensors.
        out: the folder; absent or empty.

    Raises:
        InputError: the folder is not empty, or cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with new_folder(out, "--out") as folder, warnings.catch_warnings():
        # torch warns that it assumes a single writing process, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(
                {"model": exported.weights, "optimizer": exported.states},
                storage_writer=FileSystemWriter(folder),
                no_dist=True,
            )
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values() if isinstance(cause, OSError)]
            raise causes[0] if causes else error from None


def _collect_bounded(
    rows: RowSource, table: int, name: str, num_rows: int, found: Exported, history: RowHistory
) -> None:
    schema = rows.schema
    dim = schema.tables[table].dim
    weight = torch.empty(num_rows, dim, dtype=TORCH_DTYPE[schema.dtype_of(table)])
    initial, states = InitialWeights(schema, torch.device("cpu")), _empty_states(schema, table, num_rows)
    for first in range(0, num_rows, _CHUNK_ROWS):
        ids = torch.arange(first, min(first + _CHUNK_ROWS, num_rows))
        chunk = weight[first : first + len(ids)]
        initial.fill_(chunk, torch.full_like(ids, table), ids)
        if table in history.decaying:
            records = torch.zeros(len(ids), schema.row_width(table), dtype=weight.dtype)
            records[:, :dim] = chunk
            history.catch_up(table, records)
            chunk.copy_(records[:, :dim])
            _store_states(states, ids, records[:, dim:])
    own = schema.tables[table]
    default_id, is_stored = own.default_id, torch.zeros(num_rows, dtype=torch.bool)
    default = weight.new_zeros(dim) if own.absent == "zero" else None
    for request in rows.rows(table):
        if default_id is not None and request.ids[-1] == default_id:  # they ascend
            last = dataclasses.replace(request, ids=request.ids[-1:], rows=request.rows[-1:])
            default = _split(schema, last, dim, history)[0][0]
            request = dataclasses.replace(request, ids=request.ids[:-1], rows=request.rows[:-1])
            if not len(request.ids):
                continue
        if request.ids[0] < 0 or request.ids[-1] >= num_rows:
            outside = int(request.ids[0] if request.ids[0] < 0 else request.ids[-1])
            raise InputError(f"table {schema.tables[table].name!r} has a row {outside}, beyond its {num_rows} rows")
        positions = torch.from_numpy(request.ids)
        weight[positions], values = _split(schema, request, dim, history)
        _store_states(states, positions, values)
        is_stored[positions] = True
    if default is not None:
        weight[~is_stored] = default
    _add_weight(found, name, weight, states)


def _collect_unbounded(rows: RowSource, table: int, name: str, found: Exported, history: RowHistory) -> None:
    schema = rows.schema
    dim = schema.tables[table].dim
    ids = torch.from_numpy(rows.ids(table))
    weight = torch.empty(len(ids), dim, dtype=TORCH_DTYPE[schema.dtype_of(table)])
    states = _empty_states(schema, table, len(ids))
    first = 0
    for request in rows.rows(table):
        positions = torch.arange(first, first + len(request.ids))
        weight[positions], values = _split(schema, request, dim, history)
        _store_states(states, positions, values)
        first += len(request.ids)
    found.weights[f"{name}.ids"] = ids
    _add_weight(found, name, weight, states)


def _split(schema: RowSchema, request: WriteRequest, dim: int, history: RowHistory) -> tuple[Tensor, Tensor]:
    """Weights and optimizer state of stored records."""
    records = torch.from_numpy(request.rows).view(TORCH_DTYPE[schema.dtype_of(request.table)])
    if request.table in history.decaying:
        records = records.clone()  # files are mapped
        history.catch_up(request.table, records)
    return split_record(records, schema, dim, schema.tables[request.table].optimizer)


def _empty_states(schema: RowSchema, table: int, num_rows: int) -> dict[str, Tensor]:
    """Zero states, as of rows that were never trained."""
    dim, dtype = schema.tables[table].dim, TORCH_DTYPE[schema.row_type.compute]
    return {
        name: torch.zeros((num_rows,) if is_scalar else (num_rows, dim), dtype=dtype)
        for name, is_scalar in row_states(schema.optimizer_of(table))
    }


def _store_states(states: Mapping[str, Tensor], positions: Tensor, values: Tensor) -> None:
    first = 0
    for state in states.values():
        if state.ndim == 1:
            state[positions] = values[:, first]
            first += 1
        else:
            state[positions] = values[:, first : first + state.shape[1]]
            first += state.shape[1]


def _add_weight(found: Exported, name: str, weight: Tensor, states: Mapping[str, Tensor]) -> None:
    found.weights[f"{name}.weight"] = weight
    for state, values in states.items():
        found.states[f"{name}.weight.{state}"] = values
