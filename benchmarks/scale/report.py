"""Curves to power laws, tables (Markdown) and a plot.

points of a curve ──least squares of log cost over log x──> exponent;  between neighbouring points ──> steepest part
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.harness.benchmark import Values, found_of
from benchmarks.harness.plot import log_log, panels
from benchmarks.harness.report import table, verdict
from benchmarks.scale.planning import PlanCost
from benchmarks.scale.points import Point
from benchmarks.scale.training import StepCost

__all__ = ["Fit", "Measured", "details", "draw", "fit", "tables"]

#: Slack above the wanted exponent: over a factor of 1000 the cost is then 1.23 times as large.
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One point of a curve and its cost; `error` if it could not be measured."""

    curve: str
    x: str
    point: Point
    cost: PlanCost | StepCost | None
    error: str

    @property
    def value(self) -> int:
        """Value of the varied quantity."""
        return int(getattr(self.point, self.x))


#: Quantity of a measured point.
Quantity: TypeAlias = Callable[[Measured], float]


def _of(quantity: Callable[[Any, Point], float]) -> Quantity:
    return lambda item: math.nan if item.cost is None else quantity(item.cost, item.point)


def _rows_handled(cost: PlanCost) -> float:
    """Rows of a batch that are looked up, that enter and that leave (as many)."""
    return cost.unique_rows + 2 * cost.entered_rows


PLAN_COLUMNS: Mapping[str, Quantity] = {
    "plan ms": _of(lambda cost, point: cost.plan_ms),
    "± ms": _of(lambda cost, point: cost.spread_ms / 2),
    "ns per id": _of(lambda cost, point: cost.plan_ms * 1e6 / point.ids),
    "ns per row": _of(lambda cost, point: cost.plan_ms * 1e6 / _rows_handled(cost)),
    "plan / sort": _of(lambda cost, point: cost.plan_ms / cost.sort_ms),
    "unique rows": _of(lambda cost, point: cost.unique_rows),
    "rows entered": _of(lambda cost, point: cost.entered_rows),
    "fetched MB": _of(lambda cost, point: cost.fetched_mb),
    "plan MB": _of(lambda cost, point: cost.plan_mb),
    "planner MB": _of(lambda cost, point: cost.planner_mb),
}
STEP_COLUMNS: Mapping[str, Quantity] = {
    "step ms": _of(lambda cost, point: cost.step_ms),
    "µs per example": _of(lambda cost, point: cost.step_ms * 1e3 / point.batch_size),
    "exposed ms": _of(lambda cost, point: cost.exposed_ms),
    "unique rows": _of(lambda cost, point: cost.unique_rows),
    "hit rate": _of(lambda cost, point: cost.hit_rate),
    "peak memory MB": _of(lambda cost, point: cost.peak_rss_mb),
}

#: Curve -> quantity -> largest exponent: 1 is linear, 0 flat, 0.1 where a larger x brings a few more distinct rows.
#: Memory of bounded tables is left out: it grows up to a limit by design.
PLAN_WANTED: Mapping[str, Mapping[str, float]] = {
    "batch size": {"plan ms": 1, "planner MB": 1, "plan MB": 1},
    "tables": {"plan ms": 1, "planner MB": 1, "plan MB": 1},
    "tables, ids per batch kept": {"plan ms": 0.1, "plan MB": 0.1},
    "vocabulary, raw 64-bit ids": {"plan ms": 0.1, "ns per row": 0.05, "planner MB": 0.1, "plan MB": 0.1},
    "vocabulary, bounded tables": {"plan ms": 0.1, "plan MB": 0.1},
    "lookahead": {"plan ms": 0.05, "planner MB": 1, "plan MB": 0.05},
    "cache rows": {"plan ms": 0.05, "planner MB": 1, "plan MB": 0.05},
    "ranks": {"plan ms": 1, "planner MB": 1, "plan MB": 1},
}
STEP_WANTED: Mapping[str, Mapping[str, float]] = {
    "batch size": {"step ms": 1, "peak memory MB": 1},
    "tables": {"step ms": 1, "peak memory MB": 1},
    "vocabulary, raw 64-bit ids": {"step ms": 0.05, "peak memory MB": 0.05},
    "lookahead": {"step ms": 0.05, "peak memory MB": 0.05},
    "cache rows": {"step ms": 0.05, "peak memory MB": 1},
}
#: Quantities that no power law is fitted to.
_NO_LAW = ("± ms", "plan / sort", "hit rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The measured quantities of a part of the results."""

    title: str
    part: str
    cost: type[PlanCost] | type[StepCost]
    columns: Mapping[str, Quantity]
    wanted: Mapping[str, Mapping[str, float]]


_KINDS = (
    _Kind(title="Planning", part="planning", cost=PlanCost, columns=PLAN_COLUMNS, wanted=PLAN_WANTED),
    _Kind(title="Training steps", part="training", cost=StepCost, columns=STEP_COLUMNS, wanted=STEP_WANTED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``y ~ x ** exponent`` over a whole curve; `steepest` of all neighbouring points, from `low` to `high`."""

    exponent: float
    steepest: float
    low: int
    high: int


def fit(items: Sequence[Measured], quantity: Quantity) -> Fit | None:
    """The power law of a curve. None: a value is 0 or missing, or there are fewer than two points."""
    values = [quantity(item) for item in items if not item.error]
    xs = [item.value for item in items if not item.error]
    if len(xs) < 2 or not all(value > 0 for value in values):
        return None
    slope, _ = np.polyfit(np.log(xs), np.log(values), 1)
    steps = [
        (math.log(after / before) / math.log(high / low), low, high)
        for (low, before), (high, after) in pairwise(zip(xs, values, strict=True))
    ]
    steepest, low, high = max(steps)
    return Fit(exponent=float(slope), steepest=steepest, low=low, high=high)


def tables(values: Values) -> str:
    """Wanted and found exponents, for the README."""
    parts = [
        f"{kind.title}:\n\n{_exponents(curves, kind, only_wanted=True)}"
        for kind in _KINDS
        if (curves := _curves(values, kind))
    ]
    return "\n".join(parts)


def details(values: Values) -> str:
    """Every exponent, then every point."""
    found = [(kind, curves) for kind in _KINDS if (curves := _curves(values, kind))]
    lines = [f"## {kind.title}: exponents\n\n{_exponents(curves, kind)}" for kind, curves in found]
    for kind, curves in found:
        lines += [f"## {kind.title}: {name}\n\n{_points(curve, kind.columns)}" for name, curve in curves.items()]
    return "\n".join(lines)


def _curves(values: Values, kind: _Kind) -> dict[str, list[Measured]]:
    """Points of every curve in a part of results.json."""
    found: dict[str, list[Measured]] = {}
    for item in found_of(values, kind.part) or []:
        cost = kind.cost(**item["cost"]) if "cost" in item else None
        point, error = Point(**item["point"]), item.get("error", "")
        measured = Measured(curve=item["curve"], x=item["x"], point=point, cost=cost, error=error)
        found.setdefault(measured.curve, []).append(measured)
    return found


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _exponents(curves: Mapping[str, Sequence[Measured]], kind: _Kind, *, only_wanted: bool = False) -> str:
    headers = ("curve", "quantity", "from … to", "exponent", "wanted at most", "steepest part")
    return table(headers, _exponent_rows(curves, kind, only_wanted=only_wanted))


def _exponent_rows(
    curves: Mapping[str, Sequence[Measured]], kind: _Kind, *, only_wanted: bool
) -> Iterator[tuple[str, ...]]:
    for name, curve in curves.items():
        good = [item for item in curve if not item.error]
        for column, quantity in kind.columns.items():
            found, bound = fit(curve, quantity), kind.wanted.get(name, {}).get(column)
            if found is None or column in _NO_LAW or (only_wanted and bound is None):
                continue
            ends = (f"{item.value:,}: {_number(quantity(item))}" for item in (good[0], good[-1]))
            target = "" if bound is None else f"{bound:g}: {verdict(found.exponent, at_most=bound + TOLERANCE)}"
            steepest = f"{found.steepest:+.2f}, {found.low:,} to {found.high:,}"
            yield (name, column, " … ".join(ends), f"{found.exponent:+.2f}", target, steepest)


def _points(curve: Sequence[Measured], columns: Mapping[str, Quantity]) -> str:
    rows = []
    for item in curve:
        cells = [_number(quantity(item)) for quantity in columns.values()]
        rows.append([f"{item.value:,}", *([item.error, *[""] * (len(columns) - 1)] if item.error else cells)])
    return table((curve[0].x.replace("_", " "), *columns), rows)


def draw(values: Values, folder: Path) -> None:
    """Nanoseconds per id and per row handled, and memory of the planner, over each variable."""
    curves = {
        name: good
        for name, curve in _curves(values, _KINDS[0]).items()
        if (good := [item for item in curve if not item.error])
    }
    if not curves:
        return
    with panels(folder / "curves.svg", len(curves), size=(17, 8), columns=4) as axes:
        for axis, (name, curve) in zip(axes, curves.items(), strict=True):
            xs = [item.value for item in curve]
            for column, style in (("ns per id", "o-"), ("ns per row", "s--"), ("planner MB", "^:")):
                axis.plot(xs, [PLAN_COLUMNS[column](item) for item in curve], style, label=column)
            log_log(axis, name, x=curve[0].x.replace("_", " "))
            axis.set_ylim(10, 5000)
        axes[0].legend(fontsize=8)
