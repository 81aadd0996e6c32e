"""Tensors of one table in an export: rows of a checkpoint or store, as the words that the files hold.

    rows of a table ──bagpipe.checkpoint.export──> weight, ids, states ──precision──> words by tensor name
    the same of no rows ──────────────────────────────────────────────────────────> dtypes and shapes

One table is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.row_history import RowHistory
from bagpipe.checkpoint.export import Exported, ExportTable, RowSource, add_rows
from bagpipe.errors import InputError
from bagpipe.serving.manifest import MODEL_FILE, OPTIMIZER_FILE, Precision, TableFiles
from bagpipe.serving.row_words import code_rows
from bagpipe.serving.tensor_file import TensorSpec
from bagpipe.store.interface import WriteRequest
from bagpipe.types.schema import RowSchema

__all__ = ["FileTensors", "TableTensors", "Words", "decay_of", "layout_of", "specs_of", "tensors_of", "words_of"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Words:
    """A tensor as a file holds it: dtype (a key of `tensor_file.WORDS`) and words."""

    dtype: str
    values: NDArray[Any]


#: Tensors by name, by file.
FileTensors: TypeAlias = Mapping[str, Mapping[str, Words]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableTensors:
    """The tensors of one table.

    Attributes:
        place: where its rows are.
        by_file: its tensors by name, by file.
    """

    place: TableFiles
    by_file: FileTensors


@dataclass(frozen=True, slots=True)
class _NoRows:
    """A source of no rows, for the shapes of a table's tensors."""

    schema: RowSchema

    def num_records_of(self, table: int) -> int:
        return 0

    def ids(self, table: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def rows(self, table: int) -> Iterator[WriteRequest]:
        return iter(())


def words_of(tensor: Tensor) -> Words:
    """A tensor on the host as words. Shares its memory if it is contiguous."""
    plain = tensor.detach().contiguous()
    values = plain.view(torch.uint16) if plain.dtype in _HALVES else plain
    return Words(dtype=_DTYPES[tensor.dtype], values=values.numpy())


def tensors_of(
    rows: RowSource, table: ExportTable, history: RowHistory, precision: Precision, *, states: bool
) -> TableTensors:
    """All tensors of a table.

    Args:
        rows: of the checkpoint.
        table: its name, and the number of rows of its tensor.
        history: the decay of its rows.
        precision: of the weights.
        states: include the optimizer's.

    Raises:
        InputError: the table has a row beyond its tensor, or one that the precision cannot hold.
    """
    found = Exported()
    add_rows(rows, [table], found, history)
    weight = f"{table.name}.weight"
    ids = f"{table.name}.ids" if f"{table.name}.ids" in found.weights else None
    weights = {name: words_of(tensor) for name, tensor in found.weights.items()}
    try:
        coded, dtype = _coded(weight, found.weights[weight], precision)
    except InputError as error:
        raise InputError(f"table {table.table!r}: {error}") from None
    by_file = {MODEL_FILE: {**weights, **coded}}
    if states:
        by_file[OPTIMIZER_FILE] = {name: words_of(tensor) for name, tensor in found.states.items()}
    return TableTensors(place=TableFiles(name=table.table, weight=weight, ids=ids, dtype=dtype), by_file=by_file)


def layout_of(
    rows: RowSource, table: ExportTable, history: RowHistory, precision: Precision, *, states: bool
) -> TableTensors:
    """See `tensors_of`: the tensors without values, each a view of one zero in its shape."""
    empty = replace(table, num_rows=None if table.num_rows is None else 0)
    count = table.num_rows
    if count is None:
        numbers = {own.name: number for number, own in enumerate(rows.schema.tables)}
        count = len(rows.ids(numbers[table.table]))
    found = tensors_of(_NoRows(rows.schema), empty, history, precision, states=states)
    by_file = {
        file: {name: _stretched(words, count) for name, words in tensors.items()}
        for file, tensors in found.by_file.items()
    }
    return TableTensors(place=found.place, by_file=by_file)


def decay_of(schema: RowSchema, history: RowHistory) -> dict[str, float | None]:
    """Factor of the initial weights of rows that are new now, by table; of tables whose rows decay.

    None: the decay depends on the optimizer's state, and no factor says it.
    """
    found: dict[str, float | None] = {}
    for number, table in enumerate(schema.tables):
        missed = history.missed(number)
        if missed is not None:
            weight = torch.ones(1, 1, dtype=torch.float64)
            if not missed.table.needs_state:
                missed.apply(weight, 1, torch.zeros(1, dtype=torch.int64))
            found[table.name] = None if missed.table.needs_state else weight.item()
    return found


def specs_of(tensors: Mapping[str, Words]) -> list[TensorSpec]:
    """Names, dtypes and shapes."""
    return [TensorSpec(name=name, dtype=words.dtype, shape=words.values.shape) for name, words in tensors.items()]


def _stretched(words: Words, count: int) -> Words:
    zero = np.zeros((), words.values.dtype)
    return Words(dtype=words.dtype, values=np.broadcast_to(zero, (count, *words.values.shape[1:])))


def _coded(name: str, weight: Tensor, precision: Precision) -> tuple[dict[str, Words], str]:
    """The tensors of a weight in a precision, and their dtype. Half rows stay as they are at fp16."""
    own = str(weight.dtype).removeprefix("torch.")
    if precision == "exact" or (precision == "fp16" and weight.dtype in _HALVES):
        return {}, own
    if precision == "fp16":
        half = weight.to(torch.float16)
        if not torch.equal(half.isfinite(), weight.isfinite()):
            raise InputError("a weight is beyond 65504, the largest number of fp16")
        return {name: words_of(half)}, "float16"
    coded = code_rows(weight.to(torch.float64).numpy() if weight.dtype == torch.float64 else weight.float().numpy())
    return {
        name: Words(dtype="U8", values=coded.codes),
        f"{name}.scale": Words(dtype="F32", values=coded.scale),
        f"{name}.offset": Words(dtype="F32", values=coded.offset),
    }, "int8"
