"""What the data looks like (`DataSchema`) and what a stored row looks like (`RowSchema`).

    reader ──DataSchema──> model builder ──embedding tables──> RowSchema ──> store record, oracle, cache

Both are frozen records that turn into JSON and back, so they can be compared, stored and sent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bagpipe.errors import InputError

__all__ = ["DTYPE_BYTES", "OPTIMIZER_STATE_WIDTH", "DataSchema", "Feature", "RowSchema", "RowTable", "Table"]

Pooling = Literal["sum", "mean", "none"]

#: Optimizer-state elements stored beside the `dim` weights of one row.
OPTIMIZER_STATE_WIDTH: Mapping[str, Callable[[int], int]] = {
    "sgd": lambda dim: 0,
    "adagrad": lambda dim: dim,  # sum of squared gradients, per element
    "rowwise_adagrad": lambda dim: 1,  # sum of mean squared gradients, per row
    "adam": lambda dim: 2 * dim,  # first and second moment, per element
}

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table as the data describes it.

    Attributes:
        name: table name, unique in the schema.
        rows: ids lie in ``[0, rows)``; ``None``: any 64-bit id, no vocabulary.
        hash: raw ids are hashed into ``[0, rows)`` by the reader.
        dim: embedding dimension; ``None``: the model's ``embedding_dim``.
        pooling: how the ids of a bag become one vector (``none``: a sequence).
    """

    name: str
    rows: int | None = None
    hash: bool = False
    dim: int | None = None
    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise InputError(f"table {self.name!r}: rows must be at least 1, got {self.rows}")
        if self.hash and self.rows is None:
            raise InputError(f"table {self.name!r}: hash needs rows, the number of buckets to hash into")
        if self.dim is not None and self.dim < 1:
            raise InputError(f"table {self.name!r}: dim must be at least 1, got {self.dim}")
        if self.pooling not in ("sum", "mean", "none"):
            raise InputError(f"table {self.name!r}: pooling must be sum, mean or none, got {self.pooling!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One sparse column: its name and the table its ids belong to (several features may share a table)."""

    name: str
    table: str
    weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSchema:
    """Columns of a data set. Feature order is the key order of every `Batch` made from it."""

    label: str
    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        for kind, values in (
            ("table", names),
            ("feature", [feature.name for feature in self.features]),
            ("dense column", list(self.dense)),
        ):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise InputError(f"{kind} names must be unique, {twice[0]!r} appears more than once")
        for feature in self.features:
            if feature.table not in names:
                raise InputError(f"feature {feature.name!r} names table {feature.table!r}, known tables: {names}")

    def table(self, name: str) -> Table:
        """The table called `name`; KeyError when there is none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form; `from_json` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DataSchema:
        return cls(
            label=value["label"],
            dense=tuple(value["dense"]),
            features=tuple(Feature(**feature) for feature in value["features"]),
            tables=tuple(Table(**table) for table in value["tables"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """One table whose rows are cached and stored.

    Attributes:
        name: table name; part of a row's identity and of its initial value.
        dim: weights per row.
        rows: ids lie in ``[0, rows)``; ``None``: any 64-bit id.
        init_bound: initial weights are uniform in ``[-init_bound, init_bound)``.
    """

    name: str
    dim: int
    rows: int | None = None
    init_bound: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchema:
    """Everything that fixes the bytes of a stored row: ``[weights | optimizer state]``, little-endian, in `dtype`.

    Attributes:
        tables: cached tables; a table's position is its *table number*.
        optimizer: row optimizer, a key of `OPTIMIZER_STATE_WIDTH`.
        dtype: ``float32`` or ``float64``.
        seed: seed of the initial values.
    """

    tables: tuple[RowTable, ...]
    optimizer: str
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_STATE_WIDTH:
            raise InputError(f"optim.rows must be one of {', '.join(OPTIMIZER_STATE_WIDTH)}, got {self.optimizer!r}")
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"row dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    def row_width(self, table: int) -> int:
        """Elements in one row record of table number `table`: weights, then optimizer state."""
        dim = self.tables[table].dim
        return dim + OPTIMIZER_STATE_WIDTH[self.optimizer](dim)

    def row_bytes(self, table: int) -> int:
        """Bytes in one row record of table number `table`."""
        return self.row_width(table) * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form; `from_json` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RowSchema:
        return cls(
            tables=tuple(RowTable(**table) for table in value["tables"]),
            optimizer=value["optimizer"],
            dtype=value["dtype"],
            seed=value["seed"],
        )

    def digest(self) -> str:
        """SHA-256 of the canonical JSON form, hex."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
