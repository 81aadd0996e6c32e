"""Rows of consecutive blocks, mixed: `data.shuffle_buffer`.

    parts in the epoch's order ──until they hold N rows──> group ──Philox(seed, epoch, first block)──> mixed part

A group and its order depend on its first block alone, and a position names that block. So a loader that resumes reads
the group again and goes on in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.columns import Columns, RowSlice, bag_starts, join, take_rows
from data.row_order import group_permutation

__all__ = ["Part", "mixed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Rows that are served one after the other: of one block, or of a mixed group.

    Attributes:
        segment: index of the segment of its first block in the epoch's order.
        block: number of its first block in that segment.
        file_segment: number of that segment in the order of the files.
        first_row: raw row number of its first row, as far as rows are counted.
        end_row: raw row number after the last row.
        columns: good rows.
        first, last: the good rows to serve, ``[first, last)``.
        skipped: bad rows among those to serve.
    """

    segment: int
    block: int
    file_segment: int
    first_row: int
    end_row: int
    columns: Columns
    first: int
    last: int
    skipped: int


def mixed(parts: Iterable[Part], least_rows: int, seed: int, epoch: int) -> Iterator[Part]:
    """Groups of consecutive parts with at least `least_rows` rows each (the last can have fewer), mixed.

    Holds the rows of one group, and a second time while it is mixed.
    """
    held: list[Part] = []
    rows = 0
    for part in parts:
        held.append(part)
        rows += part.last - part.first
        if rows >= least_rows:
            yield _mix(held, seed, epoch)
            held, rows = [], 0
    if held:
        yield _mix(held, seed, epoch)


def _mix(parts: Sequence[Part], seed: int, epoch: int) -> Part:
    """One part with the rows of all."""
    head = parts[0]
    batch = join(0, [RowSlice(part.columns, bag_starts(part.columns.lengths), part.first, part.last) for part in parts])
    rows = batch.num_examples
    columns = Columns(
        labels=batch.labels,
        dense=batch.dense,
        values=batch.values,
        lengths=batch.lengths,
        weights=batch.weights,
        num_raw_rows=rows,
        bad_rows=np.zeros(0, np.int64),
        example_weights=batch.example_weights,
        times_s=batch.times_s,
    )
    return Part(
        segment=head.segment,
        block=head.block,
        file_segment=head.file_segment,
        first_row=head.first_row,
        end_row=parts[-1].end_row,
        columns=take_rows(columns, group_permutation(rows, seed, epoch, head.file_segment, head.block)),
        first=0,
        last=rows,
        skipped=sum(part.skipped for part in parts),
    )
