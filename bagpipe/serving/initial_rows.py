"""`InitialRows`: the values of rows that were never trained, in numpy.

(seed, table name) ──table_key──+ id, mix 64──> row key (two 32-bit halves) ──+ column, mix 32──> 24 bits ──* scale

The rule is that of `bagpipe.kernels.initialization`, bit by bit, without torch. A manifest names it by `RULE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.serving.row_words import narrow, widen
from bagpipe.types.schema import RowSchema
from bagpipe.types.splitmix64 import mix
from bagpipe.types.table_key import table_key

__all__ = ["RULE", "InitialRows"]

#: Name of the rule in manifests. Another rule gets another name.
RULE = "blake2b-splitmix64-lowbias32-24"

_HALF_RANGE = 1 << 23
_COLUMN_STEP = np.uint64(0x9E3779B9)
_MIX_32 = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
_LOW_32 = np.uint64(0xFFFFFFFF)


class InitialRows:
    """Initial weights of a schema's tables.

    Args:
        schema: seed, table names, bounds and dtypes.
        decay: factor of the weights by table, for tables whose rows decay; None: it is not known.
    """

    def __init__(self, schema: RowSchema, decay: Mapping[str, float | None] | None = None) -> None:
        self._decay = {} if decay is None else decay
        self._schema = schema
        self._keys = [np.uint64(table_key(schema.seed, table.name) & ((1 << 64) - 1)) for table in schema.tables]

    def weights(self, table: int, ids: NDArray[np.int64]) -> NDArray[Any]:
        """``[n, dim]`` in the compute dtype: the weights that a job gives to new rows, uniform within the bound.

        Args:
            table: number of the table.
            ids: int64 ``[n]``.

        Raises:
            InputError: they have decayed, and by how much is not known.
        """
        own = self._schema.tables[table]
        words = mix(np.ascontiguousarray(ids).view(np.uint64) + self._keys[table])
        columns = ((np.arange(own.dim, dtype=np.uint64) * _COLUMN_STEP) & _LOW_32).astype(np.uint32)
        x = (words & _LOW_32).astype(np.uint32)[:, None] + columns
        x ^= x >> np.uint32(16)
        x *= _MIX_32[0]
        x ^= (words >> np.uint64(32)).astype(np.uint32)[:, None]
        x ^= x >> np.uint32(15)
        x *= _MIX_32[1]
        x ^= x >> np.uint32(16)
        compute = np.dtype(self._schema.row_type.compute)
        # The shift keeps the sign. bound * 2**-23 is exact in double; its conversion is the only rounding.
        values: NDArray[Any] = (x.view(np.int32) >> np.int32(8)).astype(compute)
        values *= compute.type(own.init_bound / _HALF_RANGE)
        dtype = self._schema.dtype_of(table)
        values = widen(narrow(values, dtype), dtype)
        factor = self._decay.get(own.name, 1.0)
        if factor is None:
            raise InputError(
                f"table {own.name!r} has no row of id {ids[0]}, and its decay depends on optimizer state: expected "
                "ids that were trained, or a table with a number of rows"
            )
        values *= compute.type(factor)  # 1 if its rows do not decay, as half rows never do
        return values
