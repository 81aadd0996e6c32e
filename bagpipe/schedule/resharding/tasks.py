"""`UnitTask`: one slice of a tensor, the ranks that have it, and the ranks that need it.

    batch (0, 1) -> batch (2, 3, 4), 6 rows      tasks: rows 0-1: 0 -> 2   2: 0 -> 3   3: 1 -> 3   4-5: 1 -> 4
    batch (0, 1) -> replicated (2, 3)            tasks: rows 0-2: 0 -> 2, 3            3-5: 1 -> 2, 3

The borders of both layouts cut the tensor into slices, so every rank has or needs a slice as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from bagpipe.schedule.resharding.layouts import Box, Layout

__all__ = ["UnitTask", "unit_tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """One slice that has to travel.

    Attributes:
        box: the slice; not empty.
        sources: ranks that have it, in the order of their layout.
        receivers: ranks that need it and do not have it, in the order of their layout; at least one.
    """

    box: Box
    sources: tuple[int, ...]
    receivers: tuple[int, ...]


def unit_tasks(source: Layout, target: Layout, rows: int, columns: int) -> tuple[UnitTask, ...]:
    """The unit tasks that make `target` of `source`, by rows, then columns.

    A rank of both layouts keeps what it has of its new part, so nothing is sent to it for that.

    Args:
        source, target: the layouts.
        rows, columns: of the whole tensor.
    """
    before = tuple(zip(source.ranks, source.boxes(rows, columns), strict=True))
    after = tuple(zip(target.ranks, target.boxes(rows, columns), strict=True))
    boxes = [box for _, box in (*before, *after) if box.elements]
    row_cuts = sorted({cut for box in boxes for cut in (box.first_row, box.end_row)})
    column_cuts = sorted({cut for box in boxes for cut in (box.first_column, box.end_column)})
    tasks = []
    for first_row, end_row in pairwise(row_cuts):
        for first_column, end_column in pairwise(column_cuts):
            box = Box(first_row=first_row, end_row=end_row, first_column=first_column, end_column=end_column)
            sources = _holders(before, box)
            receivers = tuple(rank for rank in _holders(after, box) if rank not in sources)
            if receivers:
                tasks.append(UnitTask(box=box, sources=sources, receivers=receivers))
    return tuple(tasks)


def _holders(parts: Iterable[tuple[int, Box]], box: Box) -> tuple[int, ...]:
    return tuple(rank for rank, own in parts if own.contains(box))
