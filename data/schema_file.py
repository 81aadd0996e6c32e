"""The schema TOML of a data set, which names its columns, and Criteo's fixed columns.

    label = "click"                              # of formats whose files name their columns; several: a list
    example_weight = "weight"                    # weights of the examples; absent: all weigh the same
    time = "shown_at"                            # times of the examples; absent: they have none (data.clock)
    time_unit = "ms"                             # of integers: s (the default), ms or us since 1970 UTC
    dense = ["age", "price"]
    sparse = ["user", { name = "item", table = "items", weight = "item_weight" }, "tags"]
    # further keys: column = "…", separator = "|", buckets = "log-squared" or "log", base = 2.0

    [table_defaults]                             # of every table
    dim = 16

    [tables.items]                               # of one table; all keys optional
    rows = 100000                                # ids lie in [0, rows); absent: any 64-bit id
    hash = true                                  # raw ids are hashed into [0, rows)
    dim = 32

    [tables.tags]
    pooling = "mean"                             # sum (the default), mean or none; mean only without weights
    strings = "hash"                             # ids are strings: hash, dictionary, or none (the default)
    string_seed = 0                              # of the hash
    dictionary = "tags.csv"                      # of the dictionary; default: NAME.dictionary.csv beside the schema

    [csv]                                        # see data.csv

    [synthetic]                                  # see data.synthetic

    [movielens]                                  # see data.movielens
    positive_rating = 4.0

The columns of avazu-csv, criteo-tsv and movielens are fixed: their schema file can only hold `table_defaults`, `tables`
and, for movielens, its section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature, Table
from bagpipe.util.documents import file_text, toml_tables
from data.clock import Clock
from data.log_buckets import LogBuckets
from data.string_ids import StringIds

__all__ = [
    "FeatureColumn",
    "SchemaFile",
    "check_keys",
    "clock_at",
    "criteo_schema",
    "label_of",
    "override_tables",
    "parse_schema",
    "read_schema_file",
]

_TABLE_KEYS: Mapping[str, type] = {"rows": int, "hash": bool, "dim": int, "pooling": str}
#: Keys of a table that say how its strings become ids.
_STRING_KEYS: Mapping[str, type] = {"strings": str, "string_seed": int, "dictionary": str}
_STRINGS = ("none", "hash", "dictionary")
_SPARSE_KEYS: Mapping[str, type] = {
    "name": str,
    "table": str,
    "weight": str,
    "column": str,
    "separator": str,
    "buckets": str,
    "base": float,
}
_FILE_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "label": (str, list),
    "dense": list,
    "sparse": list,
    "table_defaults": dict,
    "tables": dict,
    "example_weight": str,
    "time": str,
    "time_unit": str,
    "csv": dict,
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
class FeatureColumn:
    """The column of a feature.

    Attributes:
        name: of the column.
        separator: between the ids of one text; empty: a scalar or a list.
        buckets: the column holds numbers, which become ids by this rule; None: it holds ids.
    """

    name: str
    separator: str = ""
    buckets: LogBuckets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFile:
    """A parsed schema TOML.

    Attributes:
        schema: its columns.
        weights: feature name -> name of its weight column.
        columns: feature name -> its column, unless that is a column of ids with the feature's name.
        strings: table name -> how its strings become ids; absent: the table's ids are integers.
        csv, synthetic: the sections of these names, unparsed.
        clock: the column of the examples' times; None: they have none.
    """

    schema: DataSchema
    weights: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, FeatureColumn] = field(default_factory=dict)
    strings: Mapping[str, StringIds] = field(default_factory=dict)
    csv: Mapping[str, Any] = field(default_factory=dict)
    synthetic: Mapping[str, Any] = field(default_factory=dict)
    clock: Clock | None = None


def criteo_schema() -> DataSchema:
    """Criteo's click logs: label, I1..I13, C1..C26; one table of raw 64-bit ids per feature, with its name."""
    names = [f"C{number}" for number in range(1, 27)]
    return DataSchema(
        label="label",
        dense=tuple(f"I{number}" for number in range(1, 14)),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name) for name in names),
    )


def check_keys(where: str, value: Mapping[str, Any], types: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise InputError unless every key of `value` is in `types` and has that type, or one of them (an int is accepted
    as a float).
    """
    for key, item in value.items():
        if key not in types:
            raise InputError(f"{where}: unknown key {key!r}, known keys: {', '.join(types)}")
        found = types[key]
        expected = found if isinstance(found, tuple) else (found,)
        accepted = (int, float) if expected == (float,) else expected
        if not isinstance(item, accepted) or (isinstance(item, bool) and bool not in expected):
            words = " or ".join(_TYPE_NAMES[kind] for kind in expected)
            raise InputError(f"{where}: {key} must be {words}, got {item!r}")


def read_schema_file(path: str) -> Mapping[str, Any]:
    """The content of a schema TOML, with checked top-level keys.

    Raises:
        InputError: no such file, invalid TOML, or an unknown key.
    """
    value = toml_tables(file_text(path, subject="schema"), source=path)
    check_keys(path, value, _FILE_KEYS)
    for name, table in value.get("tables", {}).items():
        if not isinstance(table, dict):
            raise InputError(f"{path}: tables.{name} must be a table, got {table!r}")
        check_keys(f"{path}: tables.{name}", table, {**_TABLE_KEYS, **_STRING_KEYS})
    check_keys(f"{path}: table_defaults", value.get("table_defaults", {}), {**_TABLE_KEYS, **_STRING_KEYS})
    return value


def override_tables(path: str, value: Mapping[str, Any], schema: DataSchema) -> DataSchema:
    """`schema` with the table overrides of a schema file (content `value`), for a format without strings.

    Raises:
        InputError: an unknown table, or a setting that it, a feature of it, or the format does not allow.
    """
    for name, settings in (("table_defaults", value.get("table_defaults", {})), *value.get("tables", {}).items()):
        for key in _STRING_KEYS:
            if key in settings:
                raise InputError(f"{path}: {name}: {key} is for columns of strings, this format has numbers only")
    return _with_tables(path, value, schema)


def _with_tables(path: str, value: Mapping[str, Any], schema: DataSchema) -> DataSchema:
    names = [table.name for table in schema.tables]
    for name in value.get("tables", {}):
        if name not in names:
            raise InputError(f"{path}: tables.{name}: no such table, known tables: {', '.join(names)}")
    try:
        tables = [dataclasses.replace(table, **_of_table(value, table.name, _TABLE_KEYS)) for table in schema.tables]
        return dataclasses.replace(schema, tables=tuple(tables))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _of_table(value: Mapping[str, Any], name: str, keys: Mapping[str, type]) -> dict[str, Any]:
    """The given settings of a table, the defaults included, as far as they are in `keys`."""
    given = {**value.get("table_defaults", {}), **value.get("tables", {}).get(name, {})}
    return {key: item for key, item in given.items() if key in keys}


def _string_ids(path: str, value: Mapping[str, Any], table: Table) -> StringIds | None:
    """The rule by which strings of a table become ids; None: it has no strings."""
    given = _of_table(value, table.name, _STRING_KEYS)
    kind, seed = given.get("strings", "none"), given.get("string_seed", 0)
    where = f"{path}: table {table.name!r}"
    if kind not in _STRINGS:
        raise InputError(f"{where}: strings must be one of {', '.join(_STRINGS)}, got {kind!r}")
    if not 0 <= seed < 2**64:
        raise InputError(f"{where}: string_seed must be from 0 to 2**64 - 1, got {seed}")
    if kind == "none":
        return None
    if kind == "hash":
        if table.rows is not None and not table.hash:
            raise InputError(f"{where}: hashed strings are 64-bit ids: rows needs hash = true, to fold them")
        return StringIds(seed=seed)
    name = given.get("dictionary", f"{table.name}.dictionary.csv")
    return StringIds(dictionary=str(Path(path).parent / name))


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
    features, weights, columns = [], {}, {}
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
        column = _feature_column(where, item)
        if column != FeatureColumn(name=item["name"]):
            columns[item["name"]] = column
    tables = tuple(Table(name=name) for name in dict.fromkeys(feature.table for feature in features))
    try:
        schema = DataSchema(
            label=label_of(path, value),
            dense=tuple(dense),
            features=tuple(features),
            tables=tables,
            example_weight=value.get("example_weight", ""),
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    schema = _with_tables(path, value, schema)
    return SchemaFile(
        schema=schema,
        weights=weights,
        columns=columns,
        strings={table.name: ids for table in schema.tables if (ids := _string_ids(path, value, table)) is not None},
        csv=value.get("csv", {}),
        synthetic=value.get("synthetic", {}),
        clock=clock_at(path, value),
    )


def clock_at(path: str, value: Mapping[str, Any]) -> Clock | None:
    """The column of times that a schema file (content `value`) names; None: it names none.

    Raises:
        InputError: an unknown unit, or one without a column.
    """
    if "time" not in value and "time_unit" in value:
        raise InputError(f"{path}: time_unit is of the column that time names, got no time")
    try:
        return Clock(name=value["time"], unit=value.get("time_unit", "")) if "time" in value else None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def label_of(path: str, value: Mapping[str, Any]) -> str | tuple[str, ...]:
    """The label column of a schema file (content `value`), or the columns of several labels.

    Raises:
        InputError: the list is not one of names.
    """
    label = value["label"]
    if isinstance(label, str):
        return label
    if not label or not all(isinstance(name, str) and name for name in label):
        raise InputError(f"{path}: label must be a column name or a list of them, got {label!r}")
    return label[0] if len(label) == 1 else tuple(label)


def _feature_column(where: str, item: Mapping[str, Any]) -> FeatureColumn:
    """The column of an entry of `sparse`."""
    separator, rule = item.get("separator", ""), item.get("buckets", "")
    if "separator" in item and not separator:
        raise InputError(f'{where}: separator must be a text such as "|", got an empty one')
    if rule and separator:
        raise InputError(f"{where}: buckets are of one number, so they do not go together with separator")
    if "base" in item and rule != "log":
        raise InputError(f'{where}: base is of buckets = "log", got {rule or "none"}')
    try:
        buckets = LogBuckets(rule=rule, base=float(item.get("base", 2.0))) if "buckets" in item else None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return FeatureColumn(name=item.get("column", item["name"]), separator=separator, buckets=buckets)
