"""`LookupLayout`: table groups, the tables that one kernel launch looks up together. Built once per model.

    tables:    0     1     2     3           tables of one collection, equal in dimension, pooling, optimizer and dtype
    segments:  s0 s1 s2    s3    s4    ──>   are one `TableGroup`: one gather, one lookup, one segment sum
    groups:      └─── group 0 ───┘   └ group 1 ┘

Fewer groups mean fewer launches, so `convert` and `CachedBags` number equal tables side by side.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from bagpipe.errors import InputError
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.schema import FROZEN, RowTable

__all__ = ["LookupLayout", "Pooling", "TableGroup", "TableLookup", "build_layout"]

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLookup:
    """Lookup of one table.

    Attributes:
        collection: number of the embedding collection that holds the table.
        pooling: reduction of a bag to one vector; ``none``: one vector per occurrence.
        weighted: each occurrence is multiplied by a per-id weight (sum pooling only).
    """

    collection: int = 0
    pooling: Pooling = "sum"
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.weighted and self.pooling != "sum":
            raise InputError(f"per-id weights need sum pooling, got pooling {self.pooling!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """Consecutive tables that are looked up together.

    Attributes:
        index: number of the group in its layout.
        lookup: how its tables are read.
        dim: weights per row.
        optimizer: row optimizer of its tables; None: the schema's.
        dtype: of its tables' weights; None: the schema's.
        first_table, end_table: half-open range of tables.
        first_segment, end_segment: half-open range of occurrence segments.
    """

    index: int
    lookup: TableLookup
    dim: int
    first_table: int
    end_table: int
    first_segment: int
    end_segment: int
    optimizer: str | None = None
    dtype: str | None = None

    @property
    def is_frozen(self) -> bool:
        """Its rows are never updated, so no gradient is computed for them."""
        return self.optimizer == FROZEN

    @property
    def num_segments(self) -> int:
        return self.end_segment - self.first_segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLayout:
    """Table groups of a model, and its occurrence segments (`OracleSpec.features`)."""

    features: tuple[FeatureRef, ...]
    groups: tuple[TableGroup, ...]

    def collection_groups(self, collection: int) -> tuple[TableGroup, ...]:
        """Table groups of one collection, in order."""
        return tuple(group for group in self.groups if group.lookup.collection == collection)


def build_layout(
    tables: Sequence[RowTable],
    features: Sequence[FeatureRef],
    lookups: Sequence[TableLookup],
    settings: Sequence[Hashable] | None = None,
) -> LookupLayout:
    """Group consecutive tables of one dimension and dtype that are read and updated alike.

    Args:
        tables: tables, by table number.
        features: occurrence segments, sorted by table number.
        lookups: how each table is read, by table number.
        settings: by table number; tables of different settings of their optimizer are in different groups. None: all
            tables of one optimizer have the same.

    Raises:
        InputError: the segments are not sorted by table number.
    """
    segment_tables = [feature.table for feature in features]
    if segment_tables != sorted(segment_tables):
        raise InputError(f"features must be sorted by table number, got table numbers {segment_tables}")
    groups: list[TableGroup] = []
    table = segment = 0
    kinds = [(table.dim, table.optimizer, table.dtype) for table in tables]
    alike = settings if settings is not None else [None] * len(tables)
    for (lookup, (dim, optimizer, dtype), _), group in groupby(zip(lookups, kinds, alike, strict=True)):
        end_table = table + len(list(group))
        end_segment = segment + sum(table <= number < end_table for number in segment_tables)
        groups.append(
            TableGroup(
                index=len(groups),
                lookup=lookup,
                dim=dim,
                optimizer=optimizer,
                dtype=dtype,
                first_table=table,
                end_table=end_table,
                first_segment=segment,
                end_segment=end_segment,
            )
        )
        table, segment = end_table, end_segment
    return LookupLayout(features=tuple(features), groups=tuple(groups))
