"""`ColumnRules`: which columns of an Arrow table are read, and what they mean.

schema TOML, or the schema inside a file ──SchemaFile──┐
names and types of the first file's columns ───────────┴──> ColumnRules ──check──> every further file
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pyarrow as pa

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema
from data.arrow_numbers import is_list
from data.clock import Clock
from data.schema_file import FeatureColumn, SchemaFile
from data.string_hash import is_text
from data.string_ids import StringIds

__all__ = ["ColumnRules", "target_columns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """The columns of Arrow tables, and what they mean.

    Attributes:
        schema: label, dense columns, features and tables.
        columns: the column of each feature, in the order of the features.
        weights: (feature, weight column) pairs.
        strings: (table, how its strings become ids) pairs; other tables have integer ids.
        multi_hot: features with several ids in a row, in the first file.
        unlabelled: labels and weights of examples may be missing.
        absent: label columns, and the weights', that the files do not have.
        clock: the column of the examples' times; None: they have none.
        reads_times: it is read.
    """

    schema: DataSchema
    columns: tuple[FeatureColumn, ...]
    weights: tuple[tuple[str, str], ...] = ()
    strings: tuple[tuple[str, StringIds], ...] = ()
    multi_hot: frozenset[str] = frozenset()
    unlabelled: bool = False
    absent: frozenset[str] = frozenset()
    clock: Clock | None = None
    reads_times: bool = False

    @classmethod
    def of(
        cls,
        path: str,
        found: SchemaFile,
        table: pa.Schema,
        *,
        unlabelled: bool = False,
    ) -> ColumnRules:
        """The rules of a schema file for tables like that of the file `path`; `unlabelled`: see above.

        Raises:
            InputError: a column is missing or of an unsupported type.
        """
        features = found.schema.features
        columns = tuple(found.columns.get(item.name, FeatureColumn(name=item.name)) for item in features)
        multi_hot = {
            item.name
            for item, column in zip(features, columns, strict=True)
            if column.separator or is_list(_column_type(path, table, column.name))
        }
        rules = cls(
            schema=found.schema,
            columns=columns,
            weights=tuple(found.weights.items()),
            strings=tuple(found.strings.items()),
            multi_hot=frozenset(multi_hot),
            unlabelled=unlabelled,
            absent=frozenset(set(target_columns(found.schema)) - set(table.names) if unlabelled else ()),
            clock=found.clock,
        )
        rules.check(path, table)
        return rules

    def with_times(self, path: str, table: pa.Schema) -> ColumnRules:
        """The rules that read the times too; there is a clock. `path` and `table` as in `check`, which is done."""
        rules = dataclasses.replace(self, reads_times=True)
        rules.check(path, table)
        return rules

    @property
    def times(self) -> tuple[str, ...]:
        """The column of times if it is read."""
        return (self.clock.name,) if self.clock is not None and self.reads_times else ()

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of labels and weights that are read."""
        return tuple(name for name in target_columns(self.schema) if name not in self.absent)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        names = [*self.targets, *self.schema.dense, *(column.name for column in self.columns)]
        return tuple(dict.fromkeys([*names, *(name for _, name in self.weights), *self.times]))

    @property
    def dictionaries(self) -> tuple[str, ...]:
        """Paths of the dictionary files."""
        return tuple(ids.dictionary for _, ids in self.strings if ids.dictionary)

    def check(self, path: str, table: pa.Schema) -> None:
        """Raise InputError unless a table has every column, in a supported type."""
        for name in (*self.targets, *self.schema.dense):
            _check_number(path, name, _column_type(path, table, name))
        strings = dict(self.strings)
        for feature, column in zip(self.schema.features, self.columns, strict=True):
            kind = _column_type(path, table, column.name)
            if column.buckets is not None:
                _check_number(path, column.name, kind)
            elif column.separator and not is_text(kind):
                raise InputError(
                    f"{path}: column {column.name!r}: expected text with {column.separator!r} between ids, got {kind}"
                )
            elif feature.table in strings and not is_text(_element(kind)):
                raise InputError(
                    f"{path}: column {column.name!r}: expected strings, as table {feature.table!r} says, got {kind}"
                )
            elif feature.table not in strings and not column.separator and not pa.types.is_integer(_element(kind)):
                advice = ": turn them into integers first"
                if is_text(_element(kind)):
                    advice = f': for ids from strings write strings = "hash" under [tables.{feature.table}]'
                raise InputError(
                    f"{path}: column {column.name!r}: expected integer ids (or lists of them), got {kind}{advice}"
                )
        for feature_name, name in self.weights:
            self._check_weights(path, feature_name, name, table)
        if self.clock is not None and self.reads_times:
            _check_times(path, self.clock, _column_type(path, table, self.clock.name))

    def _check_weights(self, path: str, feature: str, name: str, table: pa.Schema) -> None:
        kind = _column_type(path, table, name)
        column = next(
            column for item, column in zip(self.schema.features, self.columns, strict=True) if item.name == feature
        )
        of_ids = _column_type(path, table, column.name)
        fits = pa.types.is_floating(_element(kind)) and is_list(kind) == is_list(of_ids)
        if column.separator:
            fits = is_text(kind)
        if not fits:
            raise InputError(
                f"{path}: column {name!r}: expected floating-point weights shaped like the ids of {feature!r}, "
                f"got {kind}"
            )


def target_columns(schema: DataSchema) -> tuple[str, ...]:
    """The columns of the labels, and that of the weights of examples if there is one."""
    return (*schema.labels, *filter(None, [schema.example_weight]))


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def _column_type(path: str, schema: pa.Schema, name: str) -> pa.DataType:
    count = len(schema.get_all_field_indices(name))
    if count != 1:
        fault = f"is there {count} times, expected it once" if count else "is missing"
        raise InputError(f"{path}: column {name!r} {fault}, the file has: {', '.join(schema.names)}")
    return schema.field(name).type


def _check_number(path: str, name: str, kind: pa.DataType) -> None:
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InputError(f"{path}: column {name!r}: expected numbers, got {kind}")


def _check_times(path: str, clock: Clock, kind: pa.DataType) -> None:
    has_unit = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    if not (has_unit or pa.types.is_integer(kind)):
        raise InputError(f"{path}: column {clock.name!r}: expected times as integers, timestamps or dates, got {kind}")
    if has_unit and clock.unit:
        raise InputError(f"{path}: column {clock.name!r}: time_unit is of integers, the column has its own, {kind}")
