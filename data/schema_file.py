"""The schema TOML of a data set, which names its columns, and Criteo's fixed columns.

    label = "click"                              # parquet, synthetic
    dense = ["age", "price"]
    sparse = ["user", { name = "item", table = "items", weight = "item_weight" }, "tags"]

    [table_defaults]                             # of every table
    dim = 16

    [tables.items]                               # of one table; all keys optional
    rows = 100000                                # ids lie in [0, rows); absent: any 64-bit id
    hash = true                                  # raw ids are hashed into [0, rows)
    dim = 32

    [tables.tags]
    pooling = "mean"                             # sum (the default), mean or none; mean only without weights

    [synthetic]                                  # see data.synthetic

    [movielens]                                  # see data.movielens
    positive_rating = 4.0

The columns of avazu-csv, criteo-tsv and movielens are fixed: their schema file can only hold `table_defaults`, `tables`
and, for movielens, its section.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table

__all__ = ["SchemaFile", "check_keys", "criteo_schema", "override_tables", "parse_schema", "read_schema_file"]

_TABLE_KEYS: Mapping[str, type] = {"rows": int, "hash": bool, "dim": int, "pooling": str}
_SPARSE_KEYS: Mapping[str, type] = {"name": str, "table": str, "weight": str}
_FILE_KEYS: Mapping[str, type] = {
    "label": str,
    "dense": list,
    "sparse": list,
    "table_defaults": dict,
    "tables": dict,
    "synthetic": dict,
    "movielens": dict,
}
_TYPE_NAMES: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFile:
    """A parsed schema TOML.

    Attributes:
        schema: its columns.
        weights: feature name -> name of its weight column.
        synthetic: the `[synthetic]` section, unparsed.
    """

    schema: DataSchema
    weights: Mapping[str, str] = field(default_factory=dict)
    synthetic: Mapping[str, Any] = field(default_factory=dict)


def criteo_schema() -> DataSchema:
    """Criteo's click logs: label, I1..I13, C1..C26; one table of raw 64-bit ids per feature, with its name."""
    names = [f"C{number}" for number in range(1, 27)]
    return DataSchema(
        label="label",
        dense=tuple(f"I{number}" for number in range(1, 14)),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name) for name in names),
    )


def check_keys(where: str, value: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Raise InputError unless every key of `value` is in `types` and has that type (an int is accepted as a float)."""
    for key, item in value.items():
        if key not in types:
            raise InputError(f"{where}: unknown key {key!r}, known keys: {', '.join(types)}")
        expected = types[key]
        accepted = (int, float) if expected is float else (expected,)
        if not isinstance(item, accepted) or (isinstance(item, bool) and expected is not bool):
            raise InputError(f"{where}: {key} must be {_TYPE_NAMES[expected]}, got {item!r}")


def read_schema_file(path: str) -> Mapping[str, Any]:
    """The content of a schema TOML, with checked top-level keys.

    Raises:
        InputError: no such file, invalid TOML, or an unknown key.
    """
    try:
        value = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read schema {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None
    check_keys(path, value, _FILE_KEYS)
    for name, table in value.get("tables", {}).items():
        if not isinstance(table, dict):
            raise InputError(f"{path}: tables.{name} must be a table, got {table!r}")
        check_keys(f"{path}: tables.{name}", table, _TABLE_KEYS)
    check_keys(f"{path}: table_defaults", value.get("table_defaults", {}), _TABLE_KEYS)
    return value


def override_tables(path: str, value: Mapping[str, Any], schema: DataSchema) -> DataSchema:
    """`schema` with the table overrides of a schema file (content `value`).

    Raises:
        InputError: an unknown table, or a setting that it, or a feature of it, does not allow.
    """
    overrides = value.get("tables", {})
    names = [table.name for table in schema.tables]
    for name in overrides:
        if name not in names:
            raise InputError(f"{path}: tables.{name}: no such table, known tables: {', '.join(names)}")
    defaults = value.get("table_defaults", {})
    try:
        tables = [
            dataclasses.replace(table, **{**defaults, **overrides.get(table.name, {})}) for table in schema.tables
        ]
        return dataclasses.replace(schema, tables=tuple(tables))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_schema(path: str, value: Mapping[str, Any]) -> SchemaFile:
    """The columns named in a schema file.

    Raises:
        InputError: label or sparse missing, an unknown key, another format's section, a name used twice, a table
            that no feature uses.
    """
    if "movielens" in value:
        raise InputError(f"{path}: movielens is for data.format movielens, whose columns are fixed")
    for key in ("label", "sparse"):
        if not value.get(key):
            raise InputError(f"{path}: {key} is missing: name the {key} column{'s' if key == 'sparse' else ''}")
    dense = value.get("dense", [])
    if not all(isinstance(name, str) for name in dense):
        raise InputError(f"{path}: dense must be a list of column names, got {dense!r}")
    features, weights = [], {}
    for number, entry in enumerate(value["sparse"]):
        where = f"{path}: sparse[{number}]"
        item = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(item, dict):
            raise InputError(f"{where} must be a column name or a table, got {entry!r}")
        check_keys(where, item, _SPARSE_KEYS)
        if "name" not in item:
            raise InputError(f"{where}: name is missing")
        features.append(
            Feature(name=item["name"], table=str(item.get("table", item["name"])), weighted="weight" in item)
        )
        if "weight" in item:
            weights[item["name"]] = item["weight"]
    tables = tuple(Table(name=name) for name in dict.fromkeys(feature.table for feature in features))
    try:
        schema = DataSchema(label=value["label"], dense=tuple(dense), features=tuple(features), tables=tables)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    schema = override_tables(path, value, schema)
    return SchemaFile(schema=schema, weights=weights, synthetic=value.get("synthetic", {}))
