"""The distinct rows of a batch by the tables of the data, before the batch is indexed for the tables of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.plan import RowList
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Table

__all__ = ["TableRows", "check_bounds", "features_of"]

_Value = TypeVar("_Value", bound=np.generic)


def features_of(schema: DataSchema, table: Table) -> tuple[int, ...]:
    """Numbers of the features of a table of the data."""
    return tuple(number for number, feature in enumerate(schema.features) if feature.table == table.name)


def check_bounds(batch_index: int, name: str, ids: NDArray[np.int64], rows: int) -> None:
    """Check the ids of a bounded table.

    Args:
        batch_index, name: of the batch and the table, for the message.
        ids: int64.
        rows: the ids lie in ``[0, rows)``.

    Raises:
        InputError: one does not.
    """
    if not ids.shape[0]:
        return
    least, largest = int(ids.min()), int(ids.max())
    if least < 0 or largest >= rows:
        outside = least if least < 0 else largest
        raise InputError(f"batch {batch_index}, table {name!r}: expected ids in [0, {rows}), got {outside}")


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """Distinct rows of some tables, and their uses in a batch.

    Attributes:
        rows: inside a table ascending by id.
        uses: int64 ``[len(rows)]``, occurrences of each.
    """

    rows: RowList
    uses: NDArray[np.int64]
    _inverse: tuple[NDArray[np.int64], ...]
    _spans: tuple[tuple[slice, ...], ...]

    @classmethod
    def of(cls, batch: Batch, features: Sequence[Sequence[int]]) -> TableRows:
        """The rows of a batch. `features`: of each table."""
        offsets = batch.feature_offsets().tolist()
        spans = tuple(tuple(slice(offsets[n], offsets[n + 1]) for n in own) for own in features)
        ids = [np.concatenate([batch.values[:0], *(batch.values[span] for span in own)]) for own in spans]
        found = [np.unique(own, return_inverse=True, return_counts=True) for own in ids]
        table_offsets = np.zeros(len(found) + 1, dtype=np.int64)
        np.cumsum([unique.shape[0] for unique, _, _ in found], out=table_offsets[1:])
        none = np.empty(0, dtype=np.int64)
        return cls(
            RowList(table_offsets=table_offsets, ids=np.concatenate([none, *(unique for unique, _, _ in found)])),
            np.concatenate([none, *(uses for _, _, uses in found)]).astype(np.int64, copy=False),
            tuple(inverse.reshape(-1) for _, inverse, _ in found),
            spans,
        )

    def ids_of(self, table: int) -> NDArray[np.int64]:
        """Distinct ids of a table, ascending."""
        return self.rows.ids[self.rows.table_offsets[table] : self.rows.table_offsets[table + 1]]

    def of_occurrences(self, values: NDArray[_Value]) -> Iterator[tuple[int, slice, NDArray[_Value]]]:
        """A value of each row at its occurrences: number of the table, span of a feature's occurrences, their values.

        Args:
            values: ``[len(rows)]``.
        """
        bounds = itertools.pairwise(self.rows.table_offsets.tolist())
        for table, ((start, stop), inverse, spans) in enumerate(zip(bounds, self._inverse, self._spans, strict=True)):
            of_table = values[start:stop].take(inverse)
            first = 0
            for span in spans:
                end = first + int(span.stop - span.start)
                yield table, span, of_table[first:end]
                first = end
