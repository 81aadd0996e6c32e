"""The schemas of the data (`DataSchema`) and of stored rows (`RowSchema`).

    reader ──DataSchema──> model builder ──embedding tables──> RowSchema ──> store record, oracle, cache

Both are frozen records with a JSON form, so they can be compared, stored and sent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bagpipe.errors import InputError
from bagpipe.types.row_record import (
    DECAYED,
    FROZEN,
    L2_DECAYED,
    OPTIMIZER_STATE_WIDTH,
    ROW_TYPES,
    STATE_WIDTH,
    RowType,
    base_optimizer,
)
from bagpipe.util.documents import read_value

__all__ = [
    "DECAYED",
    "FROZEN",
    "L2_DECAYED",
    "OPTIMIZER_STATE_WIDTH",
    "ROUNDINGS",
    "ROW_TYPES",
    "UNBOUNDED_DEFAULT_ID",
    "Absent",
    "DataSchema",
    "Feature",
    "Rounding",
    "RowDtype",
    "RowOptimizer",
    "RowSchema",
    "RowTable",
    "RowType",
    "Table",
    "base_optimizer",
]

Pooling = Literal["sum", "mean", "none"]
RowOptimizer = Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
RowDtype = Literal["float32", "float64", "float16", "bfloat16"]
#: Vector of an id without a row: its initial value, the table's default row, or zero.
Absent = Literal["initial", "default", "zero"]
#: Rounding of an updated weight to a half type: `bagpipe.kernels.rounding`.
Rounding = Literal["nearest", "stochastic"]

#: Id of the default row of a table that takes any other 64-bit id.
UNBOUNDED_DEFAULT_ID = -(1 << 63)

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One embedding table of the data.

    Attributes:
        name: table name, unique in the schema.
        rows: ids lie in ``[0, rows)``; ``None``: any 64-bit id, no vocabulary.
        hash: the reader hashes raw ids into ``[0, rows)``.
        dim: embedding dimension; ``None``: the model's ``embedding_dim``.
        pooling: reduction of a bag's vectors to one (``none``: a sequence).
        absent: what an id without a row reads; ``default``: a row of its own, see `num_ids`.
    """

    name: str
    rows: int | None = None
    hash: bool = False
    dim: int | None = None
    pooling: Pooling = "sum"
    absent: Absent = "initial"

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise InputError(f"table {self.name!r}: rows must be at least 1, got {self.rows}")
        if self.hash and self.rows is None:
            raise InputError(f"table {self.name!r}: hash needs rows, the number of buckets to hash into")
        if self.dim is not None and self.dim < 1:
            raise InputError(f"table {self.name!r}: dim must be at least 1, got {self.dim}")
        if self.pooling not in ("sum", "mean", "none"):
            raise InputError(f"table {self.name!r}: pooling must be sum, mean or none, got {self.pooling!r}")

    @property
    def num_ids(self) -> int | None:
        """Ids lie in ``[0, num_ids)`` if the table is bounded: those of the data, then that of its default row."""
        return None if self.rows is None else self.rows + (self.absent == "default")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form. Omits ``absent`` if it is the initial value."""
        return _without_initial(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One sparse column: its name and the table of its ids. Several features can share a table."""

    name: str
    table: str
    weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSchema:
    """Columns of a data set. Feature order is the key order of every `Batch` made from it.

    Attributes:
        label: column of the label, or the columns of several labels.
        dense: dense columns.
        features: sparse columns.
        tables: of the features.
        example_weight: column of the weights of examples; empty: all weigh the same.
    """

    label: str | tuple[str, ...]
    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]
    example_weight: str = ""

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        for kind, values in (
            ("table", names),
            ("feature", [feature.name for feature in self.features]),
            ("dense column", list(self.dense)),
            ("label", list(self.labels)),
        ):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise InputError(f"{kind} names must be unique, {twice[0]!r} appears more than once")
        for feature in self.features:
            if feature.table not in names:
                raise InputError(f"feature {feature.name!r} names table {feature.table!r}, known tables: {names}")
            if feature.weighted and self.table(feature.table).pooling == "mean":
                raise InputError(
                    f"feature {feature.name!r} has weights, so its table {feature.table!r} must not be mean-pooled: "
                    'for a weighted average divide the weights of each bag by their sum, and use pooling = "sum"'
                )

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, at least one."""
        return (self.label,) if isinstance(self.label, str) else self.label

    def table(self, name: str) -> Table:
        """The table called `name`; KeyError when there is none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)

    def context(self, names: Collection[str], suffix: str) -> DataSchema | None:
        """Some features with tables of their own, called ``TABLE.suffix``; None if no feature is named."""
        features = tuple(feature for feature in self.features if feature.name in names)
        read = {feature.table for feature in features}
        if not features:
            return None
        return DataSchema(
            label=self.label,
            dense=(),
            features=tuple(dataclasses.replace(item, table=f"{item.table}.{suffix}") for item in features),
            tables=tuple(
                dataclasses.replace(table, name=f"{table.name}.{suffix}") for table in self.tables if table.name in read
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form, the inverse of `from_json`. Omits an `example_weight` that there is not."""
        value = {**dataclasses.asdict(self), "tables": tuple(table.to_json() for table in self.tables)}
        return {key: item for key, item in value.items() if key != "example_weight" or item}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "data schema") -> DataSchema:
        """The schema of its JSON form.

        Args:
            value: what `to_json` gave.
            where: its place, for errors.

        Raises:
            InputError: a field is unknown, missing or of another type, or the schema is refused.
        """
        schema: DataSchema = read_value(cls, value, where, has_defaults=True)
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """One table whose rows are cached and stored.

    Attributes:
        name: table name; part of a row's identity and of its initial value.
        dim: weights per row.
        rows: ids lie in ``[0, rows)``, the default row's included; ``None``: any 64-bit id.
        init_bound: initial weights are uniform in ``[-init_bound, init_bound)``.
        optimizer: row optimizer, a key of `OPTIMIZER_STATE_WIDTH`; ``None``: the schema's.
        dtype: of the weights, a key of `ROW_TYPES`; ``None``: the schema's.
        absent: what an id without a row reads.
    """

    name: str
    dim: int
    rows: int | None = None
    init_bound: float = 0.01
    optimizer: str | None = None
    dtype: str | None = None
    absent: Absent = "initial"

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer not in OPTIMIZER_STATE_WIDTH:
            known = ", ".join(STATE_WIDTH)
            raise InputError(f"table {self.name!r}: optimizer must be one of {known}, got {self.optimizer!r}")
        if self.dtype is not None and self.dtype not in ROW_TYPES:
            raise InputError(f"table {self.name!r}: dtype must be one of {', '.join(ROW_TYPES)}, got {self.dtype!r}")

    @property
    def is_frozen(self) -> bool:
        """Its rows are never updated, and so never written."""
        return self.optimizer == FROZEN

    @property
    def default_id(self) -> int | None:
        """Id of the default row; None: there is none."""
        if self.absent != "default":
            return None
        return UNBOUNDED_DEFAULT_ID if self.rows is None else self.rows - 1

    @property
    def vocabulary(self) -> int | None:
        """Ids of the data lie in ``[0, vocabulary)``; None: any 64-bit id."""
        return None if self.rows is None else self.rows - (self.absent == "default")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form. Omits an optimizer or dtype that is the schema's, and ``absent`` as `Table` does."""
        value = _without_initial(dataclasses.asdict(self))
        return {key: own for key, own in value.items() if own is not None or key not in ("optimizer", "dtype")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSchema:
    """Layout of a stored row: ``[weights | optimizer state]``, little-endian.

    With ``float32`` and ``float64`` all words have the dtype of the table. With a half type only the weights do: one
    zero half pads an odd number of weights, so that the state is aligned to 4 bytes, and the state is float32. The
    length of a record is always a multiple of 4 bytes. Tensors of such records: `bagpipe.kernels.row_format`.

    Tables can have different dtypes, but all have one compute dtype: vectors and gradients are of one dtype.

    Attributes:
        tables: cached tables; a table's position is its *table number*.
        optimizer: row optimizer of the tables that name none, a key of `OPTIMIZER_STATE_WIDTH` but not `FROZEN`.
        dtype: of the weights of the tables that name none, a key of `ROW_TYPES`.
        seed: seed of the initial values and of the bits of stochastic rounding.
        rounding: of half rows, one of `ROUNDINGS`; must be ``nearest`` if no dtype is a half type.
    """

    tables: tuple[RowTable, ...]
    optimizer: str
    dtype: str = "float32"
    seed: int = 0
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        known = get_args(RowOptimizer)
        if base_optimizer(self.optimizer)[0] not in known:
            raise InputError(f"optim.rows must be one of {', '.join(known)}, got {self.optimizer!r}")
        if self.dtype not in ROW_TYPES:
            raise InputError(f"row dtype must be one of {', '.join(ROW_TYPES)}, got {self.dtype!r}")
        if self.rounding not in ROUNDINGS:
            raise InputError(f"row rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")
        for table in self.tables:
            if table.dtype is not None and ROW_TYPES[table.dtype].compute != self.row_type.compute:
                raise InputError(
                    f"table {table.name!r} has rows of {table.dtype}, other tables rows of {self.dtype}: expected "
                    "tables of float64 only, or of float32, float16 and bfloat16"
                )
        for number, table in enumerate(self.tables):
            if base_optimizer(self.optimizer_of(number))[1] and self.row_type_of(number).is_half:
                raise InputError(
                    f"table {table.name!r} has rows of {self.dtype_of(number)} that decay: expected float32 or float64"
                )
        if self.rounding != "nearest" and not self.has_half_rows:
            raise InputError(f"row rounding must be nearest with rows of {self.dtype}, got {self.rounding!r}")

    @property
    def row_type(self) -> RowType:
        """Number type of the tables that name no dtype. All tables have its compute dtype."""
        return ROW_TYPES[self.dtype]

    @property
    def has_half_rows(self) -> bool:
        """A dtype is a half type, so rounding matters."""
        return any(ROW_TYPES[dtype].is_half for dtype in self.dtypes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes there are, each once: the schema's, then those that tables name."""
        return tuple(dict.fromkeys([self.dtype, *(table.dtype or self.dtype for table in self.tables)]))

    def optimizer_of(self, table: int) -> str:
        """Row optimizer of table number `table`."""
        return self.tables[table].optimizer or self.optimizer

    def dtype_of(self, table: int) -> str:
        """Dtype of the weights of table number `table`."""
        return self.tables[table].dtype or self.dtype

    def row_type_of(self, table: int) -> RowType:
        """Number type of table number `table`."""
        return ROW_TYPES[self.dtype_of(table)]

    def row_width(self, table: int) -> int:
        """Words in one row record of table number `table`."""
        return _record_words(self.tables[table].dim, self.dtype_of(table), self.optimizer_of(table))

    def row_bytes(self, table: int) -> int:
        """Bytes in one row record of table number `table`."""
        return self.row_width(table) * self.row_type_of(table).word_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form, the inverse of `from_json`. Omits ``nearest`` rounding and the tables' optimizers and
        dtypes that are the schema's, which keeps the digests of schemas without these fields.
        """
        value = {**dataclasses.asdict(self), "tables": tuple(table.to_json() for table in self.tables)}
        if self.rounding == "nearest":
            del value["rounding"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "row schema") -> RowSchema:
        """The schema of its JSON form.

        Args:
            value: what `to_json` gave.
            where: its place, for errors.

        Raises:
            InputError: a field is unknown, missing or of another type, or the schema is refused.
        """
        schema: RowSchema = read_value(cls, value, where, has_defaults=True)
        return schema

    def digest(self) -> str:
        """SHA-256 of the canonical JSON form, hex."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def _without_initial(value: dict[str, Any]) -> dict[str, Any]:
    """A table's JSON form without an ``absent`` that is the initial value: digests of schemas without it are kept."""
    return {key: own for key, own in value.items() if key != "absent" or own != "initial"}


@functools.cache
def _record_words(dim: int, dtype: str, optimizer: str) -> int:
    """Words in a record; asked for with every request of every batch."""
    return ROW_TYPES[dtype].record_words(dim, optimizer)
