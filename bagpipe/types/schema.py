"""The schemas of the data (`DataSchema`) and of stored rows (`RowSchema`).

    reader ──DataSchema──> model builder ──embedding tables──> RowSchema ──> store record, oracle, cache

Both are frozen records with a JSON form, so they can be compared, stored and sent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bagpipe.errors import InputError
from bagpipe.util.documents import read_value

__all__ = [
    "DECAYED",
    "FROZEN",
    "L2_DECAYED",
    "OPTIMIZER_STATE_WIDTH",
    "ROUNDINGS",
    "ROW_TYPES",
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
#: Rounding of an updated weight to a half type: `bagpipe.kernels.rounding`.
Rounding = Literal["nearest", "stochastic"]

#: Optimizer of a table whose rows are read and never updated. Only tables have it (`RowTable.optimizer`).
FROZEN = "frozen"

#: Ending of the names of row optimizers whose rows decay. Their last number of state is the step that the row is at.
DECAYED = "_decayed"
#: The same, for rows whose decay is a part of their gradient, and so of the optimizer's update.
L2_DECAYED = "_l2"

_STATE_WIDTH: Mapping[str, Callable[[int], int]] = {
    "sgd": lambda dim: 0,
    "momentum": lambda dim: dim,  # velocity, per element
    "adagrad": lambda dim: dim,  # sum of squared gradients, per element
    "rowwise_adagrad": lambda dim: 1,  # sum of mean squared gradients, per row
    "adam": lambda dim: 2 * dim,  # first and second moment, per element
    "ftrl": lambda dim: 2 * dim,  # z, and the sum of squared gradients, per element
    FROZEN: lambda dim: 0,
}


def _and_step(width: Callable[[int], int]) -> Callable[[int], int]:
    return lambda dim: width(dim) + 1


#: Optimizer-state elements stored beside the `dim` weights of one row.
OPTIMIZER_STATE_WIDTH: Mapping[str, Callable[[int], int]] = {
    **_STATE_WIDTH,
    **{
        f"{name}{ending}": _and_step(width)
        for ending in (DECAYED, L2_DECAYED)
        for name, width in _STATE_WIDTH.items()
        if name != FROZEN
    },
}


def base_optimizer(name: str) -> tuple[str, bool]:
    """The optimizer without decay, and whether its rows decay."""
    base = name.removesuffix(DECAYED).removesuffix(L2_DECAYED)
    return base, base != name


@dataclass(frozen=True, slots=True, kw_only=True)
class RowType:
    """Number type of a row's weights. A record is a vector of *words* of this size.

    Attributes:
        word_bytes: bytes of a weight.
        word: numpy dtype of a word, little-endian. Half words are opaque bits to numpy, which has no bfloat16.
        compute: dtype of optimizer state, gradients and pooled vectors; narrower weights are widened for computation.
    """

    word_bytes: int
    word: str
    compute: str

    @property
    def is_half(self) -> bool:
        """Weights are narrower than the compute dtype."""
        return self.word_bytes == 2

    def weight_words(self, dim: int) -> int:
        """Words of `dim` weights in a record: an even number of halves, so that the state is aligned."""
        return dim + dim % 2 if self.is_half else dim

    def record_words(self, dim: int, optimizer: str) -> int:
        """Words of a record of `dim` weights: weights, then the state of `optimizer`."""
        state_words = 2 if self.is_half else 1
        return self.weight_words(dim) + OPTIMIZER_STATE_WIDTH[optimizer](dim) * state_words


#: By `RowSchema.dtype`.
ROW_TYPES: Mapping[str, RowType] = {
    "float32": RowType(word_bytes=4, word="<f4", compute="float32"),
    "float64": RowType(word_bytes=8, word="<f8", compute="float64"),
    "float16": RowType(word_bytes=2, word="<u2", compute="float32"),
    "bfloat16": RowType(word_bytes=2, word="<u2", compute="float32"),
}

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
        value = dataclasses.asdict(self)
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
        rows: ids lie in ``[0, rows)``; ``None``: any 64-bit id.
        init_bound: initial weights are uniform in ``[-init_bound, init_bound)``.
        optimizer: row optimizer, a key of `OPTIMIZER_STATE_WIDTH`; ``None``: the schema's.
        dtype: of the weights, a key of `ROW_TYPES`; ``None``: the schema's.
    """

    name: str
    dim: int
    rows: int | None = None
    init_bound: float = 0.01
    optimizer: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and self.optimizer not in OPTIMIZER_STATE_WIDTH:
            known = ", ".join(_STATE_WIDTH)
            raise InputError(f"table {self.name!r}: optimizer must be one of {known}, got {self.optimizer!r}")
        if self.dtype is not None and self.dtype not in ROW_TYPES:
            raise InputError(f"table {self.name!r}: dtype must be one of {', '.join(ROW_TYPES)}, got {self.dtype!r}")

    @property
    def is_frozen(self) -> bool:
        """Its rows are never updated, and so never written."""
        return self.optimizer == FROZEN

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-able form. Omits an optimizer or dtype that is the schema's."""
        value = dataclasses.asdict(self)
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


@functools.cache
def _record_words(dim: int, dtype: str, optimizer: str) -> int:
    """Words in a record; asked for with every request of every batch."""
    return ROW_TYPES[dtype].record_words(dim, optimizer)
