"""Options of synthetic data: the checked `[synthetic]` section of a schema TOML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table
from data.clock import Clock
from data.criteo_skew import COLUMNS, CRITEO_KAGGLE_ROWS
from data.schema_file import (
    check_keys,
    clock_at,
    criteo_schema,
    label_of,
    override_tables,
    parse_schema,
    read_schema_file,
)
from data.zipf import ZipfLaw

__all__ = [
    "DEFAULT_ROWS",
    "DEFAULT_ROWS_PER_DAY",
    "PROFILES",
    "SyntheticFeature",
    "SyntheticOptions",
    "options_at",
    "synthetic_schema",
]

#: Enough examples for a held-out AUC good to two decimals, few enough to train on in a minute.
DEFAULT_ROWS = 200_000
#: The default rows are ten days, as many as Avazu's log has.
DEFAULT_ROWS_PER_DAY = 20_000

PROFILES = ("criteo-sample", "criteo-kaggle")
BAG_LAWS = ("fixed", "poisson", "geometric")

_SECTION_KEYS: Mapping[str, type] = {
    "rows": int,
    "label_rate": float,
    "profile": str,
    "tables": int,
    "rows_per_day": int,
    "features": dict,
}
_FEATURE_KEYS: Mapping[str, type] = {
    "vocabulary": int,
    "exponent": float,
    "shift": float,
    "head": float,
    "missing": float,
    "bag": float,
    "bag_law": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticFeature:
    """Distribution of one sparse column.

    Attributes:
        law: of its ids.
        missing: share of empty bags.
        bag: ids in a non-empty bag: the number, or its mean; at least 1.
        bag_law: fixed; poisson (1 + Poisson(bag - 1)); geometric (from 1, mean bag).
    """

    law: ZipfLaw
    missing: float = 0.0
    bag: float = 1.0
    bag_law: str = "fixed"

    def __post_init__(self) -> None:
        if not 0 <= self.missing <= 1:
            raise InputError(f"missing must be a share between 0 and 1, got {self.missing}")
        if self.bag_law not in BAG_LAWS:
            raise InputError(f"bag_law must be one of {', '.join(BAG_LAWS)}, got {self.bag_law!r}")
        if not 1 <= self.bag <= 10_000:
            raise InputError(f"bag must be between 1 and 10000 ids, got {self.bag}")
        if self.bag_law == "fixed" and self.bag != int(self.bag):
            raise InputError(f"bag must be a whole number unless bag_law is poisson or geometric, got {self.bag}")

    def draw_lengths(self, generator: np.random.Generator, rows: int) -> NDArray[np.int32]:
        """int32 ``[rows]``, ids per bag."""
        present = generator.random(rows) >= self.missing
        if self.bag_law == "fixed":
            lengths: NDArray[Any] = np.full(rows, int(self.bag), np.int32)
        elif self.bag_law == "poisson":
            lengths = 1 + np.searchsorted(_poisson_steps(self.bag - 1), generator.random(rows), side="right")
        elif self.bag == 1:
            lengths = np.ones(rows, np.int32)
        else:
            stay = math.log1p(-1.0 / self.bag)
            lengths = 1 + np.floor(np.log1p(-generator.random(rows)) / stay)
        return (lengths * present).astype(np.int32)


def _poisson_steps(mean: float) -> NDArray[np.float64]:
    """Cumulative distribution of Poisson(mean) at 0, 1, 2, … until the tail vanishes in float64."""
    numbers = np.arange(int(mean + 40 * math.sqrt(mean + 1) + 40))
    logs = numbers * math.log(mean) if mean else np.where(numbers == 0, 0.0, -np.inf)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(numbers[1:], 1)))])
    return np.cumsum(np.exp(logs - mean - factorials))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """All settings but the seed: columns, distribution of each sparse column, examples, share of label 1, times."""

    schema: DataSchema
    features: tuple[SyntheticFeature, ...]
    rows: int = DEFAULT_ROWS
    label_rate: float = 0.25
    rows_per_day: int = DEFAULT_ROWS_PER_DAY
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InputError(f"synthetic rows must be at least 1, got {self.rows}")
        if self.rows_per_day < 1:
            raise InputError(f"synthetic rows_per_day must be at least 1, got {self.rows_per_day}")
        if not 0 < self.label_rate < 1:
            raise InputError(f"synthetic label_rate must be between 0 and 1, got {self.label_rate}")


def synthetic_schema(tables: int) -> DataSchema:
    """Criteo's dense columns and C1..Cn."""
    if tables < 1:
        raise InputError(f"synthetic tables must be at least 1, got {tables}")
    names = [f"C{number}" for number in range(1, tables + 1)]
    return DataSchema(
        label="label",
        dense=criteo_schema().dense,
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name) for name in names),
    )


def options_at(path: str, *, tables: int | None = None, profile: str | None = None) -> SyntheticOptions:
    """The options of a schema TOML; an empty path gives the defaults; `tables` and `profile` override its keys.

    Raises:
        InputError: no such file, an unknown key, a value out of range.
    """
    value = read_schema_file(path) if path else {}
    section = dict(value.get("synthetic", {}))
    section |= {key: item for key, item in (("tables", tables), ("profile", profile)) if item is not None}
    check_keys(f"{path}: synthetic", section, _SECTION_KEYS)
    chosen = section.get("profile", PROFILES[0])
    try:
        if chosen not in PROFILES:
            raise InputError(f"synthetic profile must be one of {', '.join(PROFILES)}, got {chosen!r}")
        if "sparse" in value:
            if "tables" in section:
                raise InputError("synthetic: tables counts made-up columns, but sparse names the columns")
            schema = parse_schema(path, value).schema
        else:
            schema = override_tables(path, value, synthetic_schema(section.get("tables", len(COLUMNS))))
            label = label_of(path, value) if "label" in value else schema.label
            schema = dataclasses.replace(schema, label=label, example_weight=value.get("example_weight", ""))
        return SyntheticOptions(
            schema=schema,
            features=_features(path, schema, chosen, section.get("features", {})),
            rows=section.get("rows", DEFAULT_ROWS),
            label_rate=float(section.get("label_rate", 0.25)),
            rows_per_day=section.get("rows_per_day", DEFAULT_ROWS_PER_DAY),
            clock=clock_at(path, value),
        )
    except InputError as error:
        text = str(error)
        raise InputError(text if not path or text.startswith(path) else f"{path}: {text}") from None


def _features(
    path: str, schema: DataSchema, profile: str, overrides: Mapping[str, Any]
) -> tuple[SyntheticFeature, ...]:
    names = [feature.name for feature in schema.features]
    for name, override in overrides.items():
        if name not in names:
            raise InputError(f"{path}: synthetic.features.{name}: no such feature, known features: {', '.join(names)}")
        if not isinstance(override, dict):
            raise InputError(f"{path}: synthetic.features.{name} must be a table, got {override!r}")
        check_keys(f"{path}: synthetic.features.{name}", override, _FEATURE_KEYS)
    return tuple(
        _feature(number, schema.table(feature.table), profile, overrides.get(feature.name, {}))
        for number, feature in enumerate(schema.features)
    )


def _feature(number: int, table: Table, profile: str, override: Mapping[str, Any]) -> SyntheticFeature:
    """The skew of one of Criteo's columns, taken in turn, with the overrides of the schema."""
    skew = COLUMNS[number % len(COLUMNS)]
    vocabulary = skew.law.vocabulary
    if profile == "criteo-kaggle":
        vocabulary = CRITEO_KAGGLE_ROWS[number % len(CRITEO_KAGGLE_ROWS)]
    bounded = table.rows if not table.hash else None
    vocabulary = override.get("vocabulary", bounded or vocabulary)
    if bounded is not None and vocabulary > bounded:
        raise InputError(f"vocabulary {vocabulary} does not fit into table {table.name!r} of {bounded} rows")
    return SyntheticFeature(
        law=ZipfLaw(
            vocabulary=vocabulary,
            exponent=float(override.get("exponent", skew.law.exponent)),
            shift=float(override.get("shift", skew.law.shift)),
            head=float(override.get("head", skew.law.head)),
        ),
        missing=float(override.get("missing", skew.missing)),
        bag=float(override.get("bag", 1)),
        bag_law=override.get("bag_law", "fixed"),
    )
