"""`RowFormat`: the layout of row records, and their conversion to and from the compute dtype.

    dtype               element   record, in elements                                  state
    float32, float64    4, 8 B    [dim weights | state]                                in the same dtype
    float16, bfloat16   2 B       [dim weights | 0 if dim is odd | 2 * state]          float32: two elements a number

    slots ──gather──> records ──unpack──> float [n, dim + state] ──optimizer──> the same, updated
                      records <──pack, weights rounded───────────────────────────────┘

A tensor of records has the dtype of the weights, which are its first `dim` columns. The state of half-precision rows
begins at the even element ``dim + dim % 2``, and records begin at multiples of 4 bytes, so the state can be viewed as
float32 in place. Code that only moves records treats them as bits; numpy has no bfloat16, so half elements on the host
are uint16 words (`host_words`). Arithmetic is float32: half weights are widened, which is exact, updated like float32
rows, and rounded once (`bagpipe.kernels.rounding`).

The dtype of a tensor of records is that of its table group; the tables of a schema can have different ones.

Bytes of a row of 48 weights      sgd   rowwise_adagrad   adagrad   adam
    float32                       192               196       384    576
    float16, bfloat16              96               100       288    480
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.interface import RowNames
from bagpipe.kernels.rounding import open_rounding
from bagpipe.types.schema import ROW_TYPES, RowSchema, RowType

__all__ = [
    "RowFormat",
    "first_not_finite",
    "host_words",
    "open_row_format",
    "open_row_formats",
    "row_type_of",
    "split_record",
]

_ROW_TYPES = {TORCH_DTYPE[name]: row_type for name, row_type in ROW_TYPES.items()}

#: Dtype of records on the host, by dtype of the tensor: numpy has no bfloat16.
_WORD = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.uint16,
    torch.bfloat16: torch.uint16,
}


def host_words(records: Tensor) -> NDArray[Any]:
    """A view of records in host memory as the words that stores and files take."""
    return records.view(_WORD[records.dtype]).numpy()


#: Bits of infinity, and their type; those of a NaN are larger.
_INFINITY: Mapping[str, tuple[int, str]] = {
    "float32": (0x7F80_0000, "4"),
    "float64": (0x7FF0_0000_0000_0000, "8"),
    "float16": (0x7C00, "2"),
    "bfloat16": (0x7F80, "2"),
}


def first_not_finite(words: NDArray[Any], dtype: str, dim: int, optimizer: str) -> int | None:
    """Position of the first record with a NaN or an infinity; None: all are finite.

    Two passes without a temporary array: numbers that are not finite are the largest of their sign, as integers. The
    step of a row that decays is a small one.

    Args:
        words: records on the host ``[n, width]``, see `host_words`.
        dtype: of their weights.
        dim, optimizer: of the rows.
    """
    row_type = ROW_TYPES[dtype]
    if not row_type.is_half:
        return _first_not_finite([(words, dtype)])
    first, end = row_type.weight_words(dim), row_type.record_words(dim, optimizer)
    state = [(words[:, first:end].view("u4"), row_type.compute)] if end > first else []
    return _first_not_finite([(words[:, :dim], dtype), *state])


def _first_not_finite(parts: Iterable[tuple[NDArray[Any], str]]) -> int | None:
    found = []
    for numbers, dtype in parts:
        infinity, size = _INFINITY[dtype]
        sign = 1 << (8 * int(size) - 1)
        signed, unsigned = numbers.view(f"i{size}"), numbers.view(f"u{size}")
        if signed.max(initial=0) >= infinity or unsigned.max(initial=0) >= sign | infinity:
            bad = (unsigned & np.array(sign - 1, unsigned.dtype)) >= np.array(infinity, unsigned.dtype)
            found.append(int(np.argmax(bad.any(axis=1))))
    return min(found, default=None)


def row_type_of(dtype: torch.dtype) -> RowType:
    """Number type of records, by the dtype of their tensor."""
    return _ROW_TYPES[dtype]


def split_record(records: Tensor, schema: RowSchema, dim: int, optimizer: str | None = None) -> tuple[Tensor, Tensor]:
    """Views of records ``[n, >= width]``: weights ``[n, dim]`` and state ``[n, state]``, each in its own dtype.

    Args:
        records: the records, in the dtype of their weights.
        schema: their schema.
        dim: weights per row.
        optimizer: row optimizer; None: the schema's.
    """
    row_type = row_type_of(records.dtype)
    first, end = row_type.weight_words(dim), row_type.record_words(dim, optimizer or schema.optimizer)
    state, compute = records[:, first:end], TORCH_DTYPE[row_type.compute]
    return records[:, :dim], state.view(compute) if end > first else state.new_empty(len(records), 0, dtype=compute)


class RowFormat(Protocol):
    """Conversion between records of one schema and dtype, and values in the compute dtype.

    `optimizer` is that of the rows; None: the schema's.

    Attributes:
        needs_names: `pack` needs the names of the rows.
    """

    needs_names: bool

    def width(self, dim: int, optimizer: str | None = None) -> int:
        """Elements of a record of `dim` weights."""
        ...

    def unpack(self, rows: Tensor, dim: int, optimizer: str | None = None) -> Tensor:
        """Weights and state ``[n, dim + state]`` in the compute dtype; can be `rows` itself.

        Args:
            rows: records ``[n, width]``, contiguous.
            dim: weights per row.
            optimizer: of the rows.
        """
        ...

    def pack(
        self, values: Tensor, rows: Tensor, dim: int, names: RowNames | None, step: int, optimizer: str | None = None
    ) -> None:
        """Write updated values back to the records.

        Args:
            values: the updated result of `unpack`; used as scratch.
            rows: the records given to `unpack`.
            dim: weights per row.
            names: names of the rows, ``[n]`` each, if `needs_names`.
            step: number of batches trained, this one included.
            optimizer: of the rows.

        Raises:
            JobError: needed names are missing.
        """
        ...


class _FullRowFormat:
    """Weights and state in one dtype: the optimizer works on the records in place."""

    needs_names = False

    def __init__(self, schema: RowSchema, row_type: RowType) -> None:
        self._schema = schema
        self._row_type = row_type

    def width(self, dim: int, optimizer: str | None = None) -> int:
        return self._row_type.record_words(dim, optimizer or self._schema.optimizer)

    def unpack(self, rows: Tensor, dim: int, optimizer: str | None = None) -> Tensor:
        return rows

    def pack(
        self, values: Tensor, rows: Tensor, dim: int, names: RowNames | None, step: int, optimizer: str | None = None
    ) -> None:
        assert values is rows


class _HalfRowFormat:
    """Half-precision weights and float32 state: widened, updated, rounded."""

    def __init__(self, schema: RowSchema, row_type: RowType, device: torch.device) -> None:
        self._schema = schema
        self._row_type = row_type
        self._rounding = open_rounding(schema, device)
        self.needs_names = self._rounding.needs_names

    def width(self, dim: int, optimizer: str | None = None) -> int:
        return self._row_type.record_words(dim, optimizer or self._schema.optimizer)

    def unpack(self, rows: Tensor, dim: int, optimizer: str | None = None) -> Tensor:
        weights, state = split_record(rows, self._schema, dim, optimizer)
        values = torch.empty(len(rows), dim + state.shape[1], dtype=torch.float32, device=rows.device)
        values[:, :dim].copy_(weights)
        values[:, dim:].copy_(state)
        return values

    def pack(
        self, values: Tensor, rows: Tensor, dim: int, names: RowNames | None, step: int, optimizer: str | None = None
    ) -> None:
        weights, state = split_record(rows, self._schema, dim, optimizer)
        self._rounding.write(values[:, :dim], weights, names, step)
        state.copy_(values[:, dim:])


def open_row_format(schema: RowSchema, device: torch.device, dtype: str | None = None) -> RowFormat:
    """The row format on a device of the tables of one dtype; None: that of the schema."""
    row_type = ROW_TYPES[dtype or schema.dtype]
    return _HalfRowFormat(schema, row_type, device) if row_type.is_half else _FullRowFormat(schema, row_type)


def open_row_formats(schema: RowSchema, device: torch.device) -> Mapping[torch.dtype, RowFormat]:
    """The row formats of all dtypes of a schema, by the dtype of records."""
    return {TORCH_DTYPE[dtype]: open_row_format(schema, device, dtype) for dtype in schema.dtypes}
