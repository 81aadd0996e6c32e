"""`Layout`: which rank of a stage has which part of a tensor ``[rows, columns]``: examples by features of an example.

    batch (ranks 0, 1)      features (ranks 0, 1)      replicated (ranks 0, 1)
    0 0 0 0                 0 0 1 1                    01 01 01 01
    1 1 1 1                 0 0 1 1                    01 01 01 01

Borders are rounded down, as those of micro-batches and of the ranks' examples are, so a share can be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

from bagpipe.errors import ScheduleError

__all__ = ["LAYOUT_KINDS", "Box", "Layout", "LayoutKind"]

LayoutKind = Literal["batch", "features", "replicated"]
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Box:
    """Rows ``[first_row, end_row)`` and columns ``[first_column, end_column)`` of a tensor."""

    first_row: int
    end_row: int
    first_column: int
    end_column: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return max(0, self.end_row - self.first_row) * max(0, self.end_column - self.first_column)

    @property
    def index(self) -> tuple[slice, slice]:
        """Index of the box in the whole tensor."""
        return slice(self.first_row, self.end_row), slice(self.first_column, self.end_column)

    def within(self, outer: Box) -> tuple[slice, slice]:
        """Index of the box in `outer`, which contains it."""
        return (
            slice(self.first_row - outer.first_row, self.end_row - outer.first_row),
            slice(self.first_column - outer.first_column, self.end_column - outer.first_column),
        )

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return (
            self.first_row <= other.first_row
            and other.end_row <= self.end_row
            and self.first_column <= other.first_column
            and other.end_column <= self.end_column
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a tensor over the ranks of a stage.

    Attributes:
        kind: ``batch``: every rank has some rows; ``features``: some columns; ``replicated``: all.
        ranks: of the stage, in the order of their parts.
        shares: of the ranks, in proportion; empty: equal ones. Only of a split layout.

    Raises:
        ScheduleError: an unknown kind, no rank, a rank twice, or shares that do not fit the ranks.
    """

    kind: LayoutKind
    ranks: tuple[int, ...]
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in LAYOUT_KINDS:
            raise ScheduleError(f"a layout is one of {', '.join(LAYOUT_KINDS)}, got {self.kind!r}")
        if not self.ranks or len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 0:
            raise ScheduleError(f"a layout needs different ranks from 0, at least one, got {list(self.ranks)}")
        if not self.shares:
            return
        if self.kind == "replicated":
            raise ScheduleError(f"a replicated layout has no shares, got {list(self.shares)}")
        if len(self.shares) != len(self.ranks) or min(self.shares) < 0 or not any(self.shares):
            raise ScheduleError(
                f"a layout on {len(self.ranks)} ranks needs one share per rank, at least 0 and not all 0, "
                f"got {list(self.shares)}"
            )

    def boxes(self, rows: int, columns: int) -> tuple[Box, ...]:
        """The part of each rank, in the order of `ranks`.

        Args:
            rows, columns: of the whole tensor.
        """
        return tuple(self._boxes(rows, columns))

    def _boxes(self, rows: int, columns: int) -> Iterator[Box]:
        whole = Box(first_row=0, end_row=rows, first_column=0, end_column=columns)
        if self.kind == "replicated":
            yield from (whole for _ in self.ranks)
            return
        sums = (0, *accumulate(self.shares or (1,) * len(self.ranks)))
        for before, after in pairwise(sums):
            if self.kind == "batch":
                first, end = rows * before // sums[-1], rows * after // sums[-1]
                yield Box(first_row=first, end_row=end, first_column=0, end_column=columns)
            else:
                first, end = columns * before // sums[-1], columns * after // sums[-1]
                yield Box(first_row=0, end_row=rows, first_column=first, end_column=end)
