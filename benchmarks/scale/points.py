"""Points of the curves: one quantity at a time is varied around a base point.

BASE ──replace one field──> Point, Point, … = a Curve      PLAN_CURVES: of planning      STEP_CURVES: of training
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BASE", "PLAN_CURVES", "STEP_BASE", "STEP_CURVES", "Curve", "Point", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One workload.

    Attributes:
        batch_size: examples in a global batch.
        tables: features of one id, each with a table of its own.
        vocabulary: rows of all tables together.
        bounded: whether the planner knows the tables' sizes; otherwise ids are arbitrary 64-bit numbers.
        lookahead: batches in the window.
        cache_rows: of all ranks together.
        ranks: that share the batch and the cache.
    """

    batch_size: int = 4096
    tables: int = 26
    vocabulary: int = 30_000_000
    bounded: bool = False
    lookahead: int = 64
    cache_rows: int = 500_000
    ranks: int = 1

    @property
    def ids(self) -> int:
        """Ids of a batch."""
        return self.batch_size * self.tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points along one variable; `x` names its field of `Point`."""

    name: str
    x: str
    points: tuple[Point, ...]


def _curve(name: str, base: Point, x: str, values: Sequence[int], **fixed: bool) -> Curve:
    points = tuple(dataclasses.replace(base, **{**fixed, x: value}) for value in values)  # type: ignore[arg-type]
    return Curve(name=name, x=x, points=points)


BASE = Point()

_MILLION = 1_000_000
_VOCABULARIES = (2 * _MILLION, 10 * _MILLION, 30 * _MILLION, 60 * _MILLION, 100 * _MILLION, 300 * _MILLION, 10**9)

PLAN_CURVES = (
    _curve("batch size", BASE, "batch_size", (256, 1024, 4096, 16_384, 65_536)),
    _curve("tables", BASE, "tables", (2, 8, 26, 104, 208)),
    Curve(
        name="tables, ids per batch kept",
        x="tables",
        points=tuple(
            dataclasses.replace(BASE, tables=tables, batch_size=BASE.ids // tables)
            for tables in (2, 8, 26, 104, 416, 1664)
        ),
    ),
    _curve("vocabulary, raw 64-bit ids", BASE, "vocabulary", (*_VOCABULARIES, 10**10)),
    _curve("vocabulary, bounded tables", BASE, "vocabulary", _VOCABULARIES, bounded=True),
    _curve("lookahead", BASE, "lookahead", (1, 4, 16, 64, 256, 1024)),
    _curve("cache rows", BASE, "cache_rows", (50_000, 150_000, 500_000, 1_500_000, 4_000_000)),
    _curve("ranks", BASE, "ranks", (1, 2, 4, 8, 16, 32)),
)

#: Small enough for two processors to train in seconds.
STEP_BASE = Point(batch_size=1024, cache_rows=200_000, lookahead=32)

STEP_CURVES = (
    _curve("batch size", STEP_BASE, "batch_size", (256, 1024, 4096)),
    _curve("tables", STEP_BASE, "tables", (4, 26, 104)),
    _curve("vocabulary, raw 64-bit ids", STEP_BASE, "vocabulary", (2 * _MILLION, 30 * _MILLION, 10**9)),
    _curve("lookahead", STEP_BASE, "lookahead", (2, 32, 200)),
    _curve("cache rows", STEP_BASE, "cache_rows", (50_000, 200_000, 800_000)),
)


def select(curves: Sequence[Curve], names: Sequence[str]) -> tuple[Curve, ...]:
    """The curves whose names contain one of `names`; all if there are none."""
    return tuple(curve for curve in curves if not names or any(name in curve.name for name in names))
