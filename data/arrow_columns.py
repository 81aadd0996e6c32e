"""Arrow tables as `Columns`, by the rules of a schema file: the common part of the readers that go through Arrow.

    ArrowSource.arrow_block: rows as a table ──columns_of, ColumnRules──> values, lengths, dense, labels ──> Columns

A null id or list is an empty bag, a null dense value 0; dense values are not transformed. A row is bad if a label, its
weight or its time is null, a number is not finite, an id lies outside its table, a list of ids or weights holds a null,
or the numbers of ids and weights differ (and `data.checked_read` checks its labels, its weight and its time).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.types.schema import DataSchema, Feature
from bagpipe.util.distinct_ids import distinct_ids
from data.arrow_numbers import as_ids, as_numbers, flat_values
from data.clock import UNITS, Clock
from data.column_rules import ColumnRules
from data.columns import Columns, take_rows
from data.hashing import place_ids, range_reason
from data.number_parsing import quote
from data.schema_file import FeatureColumn
from data.source import Block
from data.string_hash import is_text

__all__ = ["ArrowBlock", "ArrowSource", "columns_of"]

#: Unit of timestamps -> parts of a second.
_PARTS: Mapping[str, int] = {**UNITS, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowBlock:
    """The rows of a block that could be read, as an Arrow table.

    Attributes:
        table: the rows, with at least the columns `ColumnRules.names`.
        num_raw_rows: rows of the block, malformed ones included.
        malformed: int64, ascending positions in the block of the rows that are not in the table.
        problem: explanation for the first malformed row, unless malformed rows are skipped. The table then ends
            before that row.
    """

    table: pa.Table
    num_raw_rows: int
    malformed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    problem: str = ""

    @property
    def raw_rows(self) -> NDArray[np.int64]:
        """Position in the block of every row of the table."""
        rows = np.arange(self.num_raw_rows)
        return np.delete(rows, self.malformed)[: self.table.num_rows] if self.malformed.size else rows


class ArrowSource(ABC):
    """The common part of sources that read Arrow tables; see `data.source.Source`. A format adds the rest."""

    __slots__ = ()

    rules: ColumnRules
    bad_rows: str

    @abstractmethod
    def arrow_block(self, block: Block) -> ArrowBlock:
        """The rows of a block.

        Raises:
            InputError: the file is unreadable or has changed.
        """

    @abstractmethod
    def locate(self, block: Block, row: int) -> str:
        """See `data.source.Source`."""

    @property
    def schema(self) -> DataSchema:
        return self.rules.schema

    @property
    def unlabelled(self) -> bool:
        """Labels may be NaN: there are none."""
        return self.rules.unlabelled

    @property
    def multi_hot(self) -> frozenset[str]:
        return self.rules.multi_hot

    @property
    def clock(self) -> Clock | None:
        """See `data.clock.Clocked`."""
        return self.rules.clock

    @property
    def reads_times(self) -> bool:
        """See `data.clock.Clocked`."""
        return self.rules.reads_times

    def read(self, block: Block) -> Columns:
        found = self.arrow_block(block)
        return columns_of(self.rules, found, bad_rows=self.bad_rows, locate=lambda row: self.locate(block, row))


def columns_of(rules: ColumnRules, block: ArrowBlock, *, bad_rows: str, locate: Callable[[int], str]) -> Columns:
    """The good rows of a block.

    Args:
        rules: of the table.
        block: the rows.
        bad_rows: stop or skip.
        locate: file and line of a row of the block.

    Raises:
        InputError: a bad row under the stop policy, or an unreadable dictionary.
    """
    reader = _TableReader(rules=rules, table=block.table, keeps_shape=bad_rows == "skip")
    columns = reader.columns()
    bad = reader.bad_rows()
    if bad_rows == "stop" and bad.size:
        raise InputError(f"{locate(int(block.raw_rows[bad[0]]))}: {reader.reason(int(bad[0]))}")
    if block.problem:
        raise InputError(f"{locate(int(block.malformed[0]))}: {block.problem}")
    columns = Columns(
        labels=columns.labels,
        dense=columns.dense,
        values=columns.values,
        lengths=columns.lengths,
        weights=columns.weights,
        num_raw_rows=block.num_raw_rows,
        bad_rows=distinct_ids([block.malformed, block.raw_rows[bad]]),
        example_weights=columns.example_weights,
        times_s=columns.times_s,
    )
    return take_rows(columns, np.setdiff1d(np.arange(columns.num_rows), bad)) if bad.size else columns


def _single(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


@dataclass(slots=True, kw_only=True)
class _TableReader:
    """Converts one table to `Columns`, bad rows included.

    `problems` collects (ascending bad rows of the table, explanation for the first of them). `keeps_shape`: the arrays
    of bad rows fit together, so that these rows can be taken out.
    """

    rules: ColumnRules
    table: pa.Table
    keeps_shape: bool
    problems: list[tuple[NDArray[np.int64], str]] = field(default_factory=list)

    def bad_rows(self) -> NDArray[np.int64]:
        if not self.problems:
            return np.zeros(0, np.int64)
        return distinct_ids([rows for rows, _ in self.problems])

    def reason(self, row: int) -> str:
        return next(reason for rows, reason in self.problems if rows[0] == row)

    def columns(self) -> Columns:
        schema, rows = self.rules.schema, self.table.num_rows
        labels = [self._target(name, missing=np.nan) for name in schema.labels]
        dense = np.empty((rows, len(schema.dense)), np.float32)
        for number, name in enumerate(schema.dense):
            dense[:, number] = self._dense(name)
        lengths = np.empty((len(schema.features), rows), np.int32)
        values, weights = [], []
        for number, (feature, column) in enumerate(zip(schema.features, self.rules.columns, strict=True)):
            ids = self._ids(feature, column, lengths[number])
            values.append(ids)
            if self.rules.weights:
                weights.append(self._weights(feature, column, ids.size, lengths[number]))
        return Columns(
            labels=labels[0] if len(labels) == 1 else np.stack(labels, axis=1),
            dense=dense,
            values=np.concatenate(values),
            lengths=lengths,
            weights=np.concatenate(weights) if weights else None,
            num_raw_rows=rows,
            bad_rows=np.zeros(0, np.int64),
            example_weights=self._target(schema.example_weight, missing=1.0) if schema.example_weight else None,
            times_s=self._times(self.rules.clock) if self.rules.clock and self.rules.reads_times else None,
        )

    def _times(self, clock: Clock) -> NDArray[np.int64]:
        """Times in seconds; 0 where there is none."""
        array = _single(self.table.column(clock.name))
        if array.null_count:
            rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            self.problems.append((rows, f"expected a time in column {clock.name!r}, got null"))
        return _to_seconds(array, clock)

    def _target(self, name: str, missing: float) -> NDArray[np.float32]:
        """A label, or the weights of the examples; `missing`: the value where there is none and need be none."""
        if name in self.rules.absent:
            return np.full(self.table.num_rows, missing, np.float32)
        array = _single(self.table.column(name))
        if array.null_count:
            rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            if self.rules.unlabelled:
                numbers = _to_float32(array).copy()
                numbers[rows] = missing
                return numbers
            self.problems.append((rows, f"expected a number in column {name!r}, got null"))
        return _to_float32(array)

    def _dense(self, name: str) -> NDArray[np.float32]:
        numbers = _to_float32(_single(self.table.column(name)))
        finite = np.isfinite(numbers)
        if not finite.all():
            rows = np.flatnonzero(~finite)
            self.problems.append((rows, f"expected a finite number in column {name!r}, got nan or infinity"))
        return numbers

    def _ids(self, feature: Feature, column: FeatureColumn, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Ids of one feature; writes its lengths to `lengths`."""
        lengths[:], array = self._bags(column.name, column.separator, "ids")
        return self._in_table(feature, self._numbered(feature, column, array, lengths), lengths)

    def _bags(self, name: str, separator: str, what: str) -> tuple[NDArray[np.int32], pa.Array]:
        """Values in each row of a column of ids or their weights, int32 ``[n]``, and the values, without nulls.

        A null is no value; a list that holds one is a bad row, with 0 in its place.
        """
        lengths, array = flat_values(self.table.column(name), separator)
        if not array.null_count:
            return np.ones(len(array), np.int32) if lengths is None else lengths, array
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        if lengths is None:
            return valid.astype(np.int32), array.drop_null()
        got = f"nothing beside a {separator!r}" if separator else "a list with null"
        self._add(lengths, np.flatnonzero(~valid), f"expected {what} in column {name!r}, got {got}")
        return lengths, array.fill_null(b"0" if is_text(array.type) else 0)

    def _numbered(
        self, feature: Feature, column: FeatureColumn, array: pa.Array, lengths: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Values of one feature, without nulls, as ids."""
        if column.buckets is not None:
            numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            finite = np.isfinite(numbers)
            if not finite.all():
                reason = f"expected a finite number in column {column.name!r}, got nan or infinity"
                self._add(lengths, np.flatnonzero(~finite), reason)
                numbers = np.where(finite, numbers, 0.0)
            return column.buckets.ids_of(numbers)
        strings = dict(self.rules.strings).get(feature.table)
        if strings is not None:
            return strings.ids_of(array)
        if is_text(array.type):
            ids, wrong = as_ids(array)
            self._add_texts(lengths, array, wrong, f"expected integer ids in column {column.name!r}")
            return ids
        found: NDArray[np.int64] = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        return found

    def _in_table(self, feature: Feature, ids: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Ids folded into their table, or checked for its range."""
        table = self.rules.schema.table(feature.table)
        ids, outside = place_ids(ids, table)
        if outside.size:
            self._add(lengths, outside, range_reason(table, int(ids[outside[0]])))
        return ids

    def _weights(
        self, feature: Feature, column: FeatureColumn, num_ids: int, lengths: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        name = dict(self.rules.weights).get(feature.name)
        if name is None:
            return np.ones(num_ids, np.float32)
        counts, array = self._bags(name, column.separator, "weights")
        if column.separator:
            texts = array
            array, wrong = as_numbers(texts)
            self._add_texts(counts, texts, wrong, f"expected numbers in column {name!r}")
        weights = _to_float32(array)
        finite = np.isfinite(weights)
        if not finite.all():
            reason = f"expected finite weights in column {name!r}, got nan or infinity"
            self._add(counts, np.flatnonzero(~finite), reason)
        differ = np.flatnonzero(counts != lengths)
        if not differ.size:
            return weights
        reason = f"expected as many weights in {name!r} as ids in {feature.name!r}, got another number"
        self.problems.append((differ, reason))
        # Bad rows are dropped later; until then the shapes of the arrays must agree.
        return _refit(weights, counts, lengths) if self.keeps_shape else np.ones(num_ids, np.float32)

    def _add(self, lengths: NDArray[np.int32], positions: NDArray[np.int64], reason: str) -> None:
        """Add the rows of bad ids, given by position."""
        self.problems.append((distinct_ids([_row_of(lengths, positions)]), reason))

    def _add_texts(self, lengths: NDArray[np.int32], texts: pa.Array, positions: NDArray[np.int64], words: str) -> None:
        if positions.size:
            self._add(lengths, positions, f"{words}, got {quote(texts[int(positions[0])].as_py())}")


def _to_float32(array: pa.Array) -> NDArray[np.float32]:
    """Numbers or booleans ``[n]``; null becomes 0, a number beyond float32 infinity."""
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float32] = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return numbers


def _to_seconds(array: pa.Array, clock: Clock) -> NDArray[np.int64]:
    """Seconds since 1970 UTC of timestamps, dates or integers, without their fractions; null becomes 0."""
    parts = clock.parts
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(array.type):
        parts = _PARTS[array.type.unit]
        array = array.cast(pa.int64())
    found: NDArray[np.int64] = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found if parts == 1 else found // parts


def _row_of(lengths: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row within the table of each id position of one feature."""
    return np.searchsorted(np.cumsum(lengths, dtype=np.int64), positions, side="right").astype(np.int64)


def _refit(weights: NDArray[np.float32], counts: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """`weights` with ones in the rows where `counts` and `lengths` differ."""
    fitted = np.ones(int(lengths.sum()), np.float32)
    same = counts == lengths
    fitted[np.repeat(same, lengths)] = weights[np.repeat(same, counts)]
    return fitted
