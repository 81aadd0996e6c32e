"""`narrowed`: a source with some of its sparse features, and with or without its dense columns. Same rows, same blocks.

    source.narrowed(features, dense)  of formats that read columns apart, where a bad row stops the job
    NarrowedSource                    of all others: reads every column, drops the rest

Where malformed rows are skipped, every column decides which rows there are, so all of them are read. A position saved
by a loader of one is valid for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from bagpipe.types.schema import DataSchema
from data.columns import Columns, bag_starts
from data.source import Block, Segment, Source

__all__ = ["Narrowable", "NarrowedSource", "narrowed", "narrowed_schema"]


@runtime_checkable
class Narrowable(Protocol):
    """A source that can leave columns unread."""

    def narrowed(self, features: tuple[int, ...], *, dense: bool) -> Source:
        """See `narrowed`."""
        ...


def narrowed(source: Source, features: Sequence[int], *, dense: bool) -> Source:
    """The source with these features.

    Args:
        source: all features.
        features: ascending numbers; can be empty.
        dense: with its dense columns; else there are none.
    """
    numbers = tuple(features)
    if dense and numbers == tuple(range(len(source.schema.features))):
        return source
    if isinstance(source, Narrowable) and source.bad_rows == "stop":
        return source.narrowed(numbers, dense=dense)
    return NarrowedSource(source=source, features=numbers, dense=dense)


def narrowed_schema(schema: DataSchema, features: Sequence[int], *, dense: bool) -> DataSchema:
    """The schema with these features; it keeps all tables."""
    return dataclasses.replace(
        schema,
        dense=schema.dense if dense else (),
        features=tuple(schema.features[feature] for feature in features),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowedSource:
    """A source whose other columns are read and dropped.

    Attributes:
        source: all features.
        features, dense: see `narrowed`.
    """

    source: Source
    features: tuple[int, ...]
    dense: bool

    @property
    def files(self) -> tuple[str, ...]:
        return self.source.files

    @property
    def schema(self) -> DataSchema:
        return narrowed_schema(self.source.schema, self.features, dense=self.dense)

    @property
    def in_processes(self) -> bool:
        return self.source.in_processes

    @property
    def multi_hot(self) -> frozenset[str]:
        return self.source.multi_hot & {feature.name for feature in self.schema.features}

    @property
    def bad_rows(self) -> str:
        return self.source.bad_rows

    @property
    def layout(self) -> str:
        return self.source.layout

    def segments(self) -> tuple[Segment, ...]:
        return self.source.segments()

    def blocks(self, segment: Segment) -> Iterator[Block]:
        return self.source.blocks(segment)

    def read(self, block: Block) -> Columns:
        columns = self.source.read(block)
        starts = bag_starts(columns.lengths)
        spans = [slice(int(starts[feature, 0]), int(starts[feature, -1])) for feature in self.features]
        weights = columns.weights
        is_weighted = any(feature.weighted for feature in self.schema.features)
        return dataclasses.replace(
            columns,
            dense=columns.dense if self.dense else columns.dense[:, :0],
            values=np.concatenate([columns.values[:0], *(columns.values[span] for span in spans)]),
            lengths=columns.lengths[list(self.features)].reshape(-1, columns.num_rows),
            weights=np.concatenate([weights[span] for span in spans]) if weights is not None and is_weighted else None,
        )

    def locate(self, block: Block, row: int) -> str:
        return self.source.locate(block, row)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return self.source.count_rows(segment, at_most)
