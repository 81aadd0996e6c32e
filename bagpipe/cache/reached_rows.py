"""`reached_rows`: the rows of a batch that a gradient reached, where backwards are partial.

    gradients ──sum──> one per row ──all columns zero?──> no update: weights, state and step of the row stay

`with_touched_rows`: the rows that a lookup has, where the model looks up other ids than the planned ones.

A row is reached by the examples whose micro-batch computed the backward of the stage that reads it. Owners see sums
only, so the rule is of the sum: a row whose gradient is exactly zero in every column, over the whole global batch, is
not updated. Neither is it written back, unless an earlier batch changed it. On a device, the host waits for the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bagpipe.cache.lookup import ActiveTableGroup, gradients_of, touched_rows
from bagpipe.cache.slots import row_tables
from bagpipe.cache.upload import SlotRows
from bagpipe.kernels.interface import Gradients, Kernels, RowNames
from bagpipe.kernels.segment_sum import SegmentSum
from bagpipe.oracle.plan import RowList

__all__ = ["reached_rows", "with_touched_rows"]


def reached_rows(
    kernels: Kernels, rows: SlotRows, gradients: Sequence[Gradients]
) -> tuple[SlotRows, Sequence[Gradients]]:
    """The rows with a gradient that is not zero, and their gradients.

    Args:
        kernels: that sum gradients.
        rows: at least one.
        gradients: of the rows.
    """
    vectors = kernels.sum(gradients)
    chosen = np.flatnonzero(vectors.ne(0).any(1).cpu().numpy())  # NaN is not zero
    return (rows, gradients) if len(chosen) == len(rows.rows) else _some(rows, vectors, chosen)


def with_touched_rows(
    kernels: Kernels, rows: SlotRows, group: ActiveTableGroup
) -> tuple[SlotRows, Sequence[Gradients]]:
    """The rows that a lookup of a group has (`touched_rows`), and their gradients; `rows` itself: all.

    Args:
        kernels: that sum gradients.
        rows: of the group.
        group: after its backward, with at least one gradient.
    """
    gradients, touched = gradients_of(group, 0), touched_rows(group)
    if touched is None:
        return rows, gradients
    return _some(rows, kernels.sum(gradients), np.flatnonzero(touched))


def _some(rows: SlotRows, vectors: torch.Tensor, chosen: NDArray[np.int64]) -> tuple[SlotRows, Sequence[Gradients]]:
    """Some rows, and their gradients.

    Args:
        rows: of which some are chosen.
        vectors: ``[len(rows), dim]``, the gradient of each.
        chosen: int64 ``[k]``, ascending positions.
    """
    index = torch.from_numpy(chosen).to(vectors.device)
    tables = row_tables(rows.rows)[chosen]
    num_tables = len(rows.rows.table_offsets) - 1
    names = rows.names
    some = SlotRows(
        rows=RowList(
            table_offsets=np.searchsorted(tables, np.arange(num_tables + 1)).astype(np.int64),
            ids=rows.rows.ids[chosen],
        ),
        slots=rows.slots[chosen],
        slot_index=rows.slot_index.index_select(0, index),
        names=None
        if names is None
        else RowNames(tables=names.tables.index_select(0, index), ids=names.ids.index_select(0, index)),
    )
    return some, [Gradients(vectors=vectors.index_select(0, index), segment_sum=_one_each(len(chosen), vectors))]


def _one_each(num_rows: int, like: torch.Tensor) -> SegmentSum:
    """Each row's sum is its own vector."""
    starts = np.arange(num_rows + 1, dtype=np.int32)
    offsets = torch.from_numpy(starts).to(like.device)
    return SegmentSum(
        row_starts=starts, row_offsets=offsets, sources=offsets[:num_rows], coefficients=None, occurrences=None
    )
