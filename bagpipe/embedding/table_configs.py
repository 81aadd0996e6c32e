"""Tables of torchrec's collections as tables of rows.

EmbeddingBagConfig, EmbeddingConfig ──row_table──> RowTable: name, dim, rows, bound of the initial weights
                                    ──dtype_of──> dtype of its rows
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from bagpipe.errors import InputError
from bagpipe.types.schema import Absent, DataSchema, RowTable, Table

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_configs import DataType, PoolingType

__all__ = ["UNBOUNDED_INIT_BOUND", "dtype_of", "row_table"]

#: A torchrec table config: torchrec has no type information.
Untyped: TypeAlias = Any

#: Initial bound of a table without a vocabulary, where torchrec's sqrt(1 / num_embeddings) is meaningless.
UNBOUNDED_INIT_BOUND = 0.01

#: Dtype of rows by `data_type`; None: that of the dense part.
_DTYPES: dict[DataType, str | None] = {DataType.FP32: None, DataType.FP16: "float16", DataType.BF16: "bfloat16"}


def dtype_of(config: Untyped) -> str | None:
    """Dtype of the rows of a table, a key of `ROW_TYPES`; None: that of the dense part.

    Raises:
        InputError: rows cannot have its `data_type`.
    """
    if config.data_type not in _DTYPES:
        known = ", ".join(kind.value for kind in _DTYPES)
        raise InputError(f"table {config.name!r}: data_type must be one of {known}, got {config.data_type.value}")
    return _DTYPES[config.data_type]


def row_table(config: Untyped, schema: DataSchema, table_rows: Mapping[str, int | None] | None = None) -> RowTable:
    """The rows of a table, with the optimizer and the dtype of the row schema.

    Args:
        config: of the table.
        schema: of the data; it has the features of the table.
        table_rows: rows of each table, by name, None for an unbounded one. None: as the data's vocabularies say.

    Raises:
        InputError: the data lacks a feature, the table is smaller than its vocabulary, or a setting is not supported.
    """
    known = {feature.name: feature for feature in schema.features}
    unknown = [name for name in config.feature_names if name not in known]
    if unknown:
        raise InputError(f"table {config.name!r} reads feature {unknown[0]!r}, the data has {list(known)}")
    vocabularies = [schema.table(known[name].table).rows for name in config.feature_names]
    absent = _absent([schema.table(known[name].table) for name in config.feature_names], config)
    if table_rows is not None:
        rows = table_rows[config.name]
    else:
        rows = None if None in vocabularies else max((size for size in vocabularies if size is not None), default=0)
    if rows is not None and config.num_embeddings < rows:
        raise InputError(
            f"table {config.name!r}: num_embeddings must be at least the data's {rows}, got {config.num_embeddings}"
        )
    return RowTable(
        name=config.name,
        dim=config.embedding_dim,
        rows=None if rows is None else rows + (absent == "default"),
        init_bound=_init_bound(config, bounded=rows is not None),
        absent=absent,
    )


def _absent(tables: Sequence[Table], config: Untyped) -> Absent:
    """What an id without a row reads: what the data's table says.

    Raises:
        InputError: several tables of the data say it, or the table's pooling cannot leave ids out.
    """
    kinds = {table.absent for table in tables}
    if kinds <= {"initial"}:
        return "initial"
    if len({table.name for table in tables}) > 1:
        names = ", ".join(sorted({table.name for table in tables}))
        raise InputError(
            f"table {config.name!r}: expected features of one table of the data with data.min_uses above 1, got those "
            f"of {names}"
        )
    absent = tables[0].absent
    pooling = getattr(config, "pooling", None)
    if absent == "zero" and pooling is not PoolingType.SUM:
        raise InputError(
            f"table {config.name!r}: data.default_row zero leaves ids out of bags, so it must be sum-pooled: use "
            "trained"
        )
    return absent


def _init_bound(config: Untyped, *, bounded: bool) -> float:
    """Bound of the uniform initial weights in ``[-bound, bound)``; other initialisers are errors."""
    default_init = isinstance(config.init_fn, functools.partial) and config.init_fn.func is nn.init.uniform_
    if config.init_fn is not None and not default_init:
        raise InputError(
            f"table {config.name!r}: init_fn is not supported, since initial rows are a pure function of "
            "(seed, table, id, column); expected weight_init_max or nothing"
        )
    low, high = config.weight_init_min, config.weight_init_max
    if (high is not None and high <= 0) or (low is not None and (high is None or low != -high)):
        raise InputError(
            f"table {config.name!r}: expected weight_init_max above 0 and weight_init_min = -weight_init_max, "
            f"or neither, got {high} and {low}"
        )
    if high is not None:
        return float(high)
    return math.sqrt(1 / config.num_embeddings) if bounded else UNBOUNDED_INIT_BOUND
