"""Initial weights: a pure function of (seed, table name, id, column), with the same bits on every device.

    (seed, table name) ──blake2b──> table key ──+ id, mix 64──> row key (two 32-bit halves)
    low half + column * C ──mix 32, high half in the middle──> 24 bits k ──> (k - 2**23) * scale

Only wrapping integer arithmetic and one correctly rounded multiplication are used, so results depend on no device and
no vector width. Half-precision weights are the float32 values, rounded to nearest (ties to even). Optimizer state
starts at zero. Stochastic rounding (`bagpipe.kernels.rounding`) draws random words in the same way, under other keys.
The mixers are the finalizers of splitmix64 (Steele, Lea, Flood 2014) and "lowbias32" (Wellons, 2018).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.types.schema import RowSchema, RowTable
from bagpipe.types.table_key import signed, table_key

__all__ = ["TORCH_DTYPE", "InitialWeights", "initial_weights", "random_words", "step_key", "table_key"]

TORCH_DTYPE = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

#: 24 random bits per weight: every integer in [-2**23, 2**23) is exact in float32.
_HALF_RANGE = 1 << 23
_COLUMN_STEP = 0x9E3779B9  # 2**32 / golden ratio, odd: spreads consecutive columns


_WORDS_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORDS_32 = (0x7FEB352D, 0x846CA68B)
_MIX_64 = (signed(_WORDS_64[0], 64), signed(_WORDS_64[1], 64))
_MIX_32 = (signed(_WORDS_32[0], 32), signed(_WORDS_32[1], 32))

#: Words mixed at a time on the host, so that every pass over them finds them in a core's cache.
_HOST_CHUNK_BYTES = 1 << 17


def step_key(step: int) -> int:
    """Hash of a step number, as a signed 64-bit integer. Added to a table key, it gives a key of table and step."""
    mask = (1 << 64) - 1
    x = step & mask
    x = (x ^ x >> 30) * _MIX_64[0] & mask
    x = (x ^ x >> 27) * _MIX_64[1] & mask
    return signed(x ^ x >> 31, 64)


def _xor_shift_(x: Tensor, shift: int, bits: int, scratch: Tensor) -> None:
    """``x ^= x >> shift`` with a logical shift: torch shifts arithmetically, so the copied sign bits are masked off."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (bits - shift)) - 1)
    x.bitwise_xor_(scratch)


def _row_keys(ids: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The 64-bit key of each row, as two int32 halves (low, high)."""
    x = ids + keys
    scratch = torch.empty_like(x)
    _xor_shift_(x, 30, 64, scratch)
    x.mul_(_MIX_64[0])
    _xor_shift_(x, 27, 64, scratch)
    x.mul_(_MIX_64[1])
    _xor_shift_(x, 31, 64, scratch)
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def random_words(ids: Tensor, keys: Tensor, num_columns: int) -> Tensor:
    """int32 ``[n, num_columns]``: 32 uniform random bits for each row and column.

    Args:
        ids: int64 ``[n]``.
        keys: int64 ``[n]``, `table_key` of each row's table.
        num_columns: number of columns.
    """
    if ids.device.type == "cpu":
        return torch.from_numpy(_words_on_host(ids.numpy(), keys.numpy(), num_columns))
    return _words_on_device(ids, keys, num_columns)


def _words_on_device(ids: Tensor, keys: Tensor, num_columns: int) -> Tensor:
    """`random_words` with torch, on any device."""
    low, high = _row_keys(ids, keys)
    # The cast reduces modulo 2**32, as unsigned products would.
    columns = (torch.arange(num_columns, device=ids.device) * _COLUMN_STEP).to(torch.int32)
    x = low.unsqueeze(1) + columns
    scratch = torch.empty_like(x)
    _xor_shift_(x, 16, 32, scratch)
    x.mul_(_MIX_32[0])
    x.bitwise_xor_(high.unsqueeze(1))
    _xor_shift_(x, 15, 32, scratch)
    x.mul_(_MIX_32[1])
    _xor_shift_(x, 16, 32, scratch)
    return x


def _words_on_host(ids: NDArray[np.int64], keys: NDArray[np.int64], num_columns: int) -> NDArray[np.int32]:
    """`random_words` with numpy, whose unsigned shifts need no masks: a third of the time for a few hundred rows."""
    x = ids.view(np.uint64) + keys.view(np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_WORDS_64[0])
    x ^= x >> np.uint64(27)
    x *= np.uint64(_WORDS_64[1])
    x ^= x >> np.uint64(31)
    low, high = x.astype(np.uint32)[:, None], (x >> np.uint64(32)).astype(np.uint32)[:, None]
    columns = (np.arange(num_columns, dtype=np.uint64) * np.uint64(_COLUMN_STEP)).astype(np.uint32)
    words = np.empty((len(x), num_columns), dtype=np.uint32)
    num_rows = max(1, _HOST_CHUNK_BYTES // max(1, words[:1].nbytes))
    scratch = np.empty((min(num_rows, len(x)), num_columns), dtype=np.uint32)
    for first in range(0, len(x), num_rows):
        y = words[first : first + num_rows]
        shifted = scratch[: len(y)]
        np.add(low[first : first + num_rows], columns, out=y)
        y ^= np.right_shift(y, np.uint32(16), out=shifted)
        y *= np.uint32(_WORDS_32[0])
        y ^= high[first : first + num_rows]
        y ^= np.right_shift(y, np.uint32(15), out=shifted)
        y *= np.uint32(_WORDS_32[1])
        y ^= np.right_shift(y, np.uint32(16), out=shifted)
    return words.view(np.int32)


class InitialWeights:
    """Initial weights of a schema's tables on one device.

    Args:
        schema: seed, table names, bounds and dtype.
        device: device of ids and weights.

    Attributes:
        dtype: compute dtype.
        keys, scales: int64 and `dtype`, one per table: key of its random words, and their scale.
    """

    def __init__(self, schema: RowSchema, device: torch.device) -> None:
        self.dtype = TORCH_DTYPE[schema.row_type.compute]
        self.device = device
        keys = [table_key(schema.seed, table.name) for table in schema.tables]
        # bound * 2**-23 is exact in double; the conversion to the compute dtype is the only rounding.
        scales = [table.init_bound / _HALF_RANGE for table in schema.tables]
        self.keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self.scales = torch.tensor(scales, dtype=self.dtype, device=device)

    def fill_(self, out: Tensor, tables: Tensor, ids: Tensor) -> None:
        """Write the initial weights of rows into `out`.

        Args:
            out: ``[n, dim]`` in the dtype of the rows, any strides. Half dtypes are rounded to nearest.
            tables: int64 ``[n]`` table numbers; all these tables have dimension `dim`.
            ids: int64 ``[n]``.
        """
        x = random_words(ids, self.keys.index_select(0, tables), out.shape[1])
        # The arithmetic shift keeps the sign, so the top 24 bits become a uniform integer in [-2**23, 2**23).
        x.bitwise_right_shift_(8)
        torch.mul(x.to(self.dtype), self.scales.index_select(0, tables).unsqueeze(1), out=out)


def initial_weights(
    table: RowTable, ids: NDArray[np.int64], *, seed: int, dtype: str = "float32", device: str = "cpu"
) -> Tensor:
    """Initial weights ``[n, dim]`` of rows of one table, uniform in ``[-init_bound, init_bound)``."""
    schema = RowSchema(tables=(table,), optimizer="sgd", dtype=dtype, seed=seed)
    where = torch.device(device)
    out = torch.empty(len(ids), table.dim, dtype=TORCH_DTYPE[dtype], device=where)
    id_tensor = torch.from_numpy(np.array(ids, dtype=np.int64)).to(where)
    InitialWeights(schema, where).fill_(out, torch.zeros_like(id_tensor), id_tensor)
    return out
