"""Curves to exponents, tables (Markdown) and a plot.

Measured… ──by curve──> least squares of log y over log x ──> exponent;  between neighbours ──> where it bends
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.planning import PlanCost
from benchmarks.scale.points import Point
from benchmarks.scale.training import StepCost

__all__ = ["Fit", "Measured", "draw", "fit", "from_json", "markdown", "median_of", "summary", "to_json"]

#: How much more than the wanted exponent still counts: over a factor of 1000 the cost is then 1.23 times as large.
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One point of a curve and what it cost; `error` if it could not be measured."""

    curve: str
    x: str
    point: Point
    plan: PlanCost | None = None
    step: StepCost | None = None
    error: str = ""

    @property
    def value(self) -> int:
        """Of the variable."""
        return int(getattr(self.point, self.x))


def _of_plan(quantity: Callable[[PlanCost, Point], float]) -> Callable[[Measured], float]:
    return lambda item: quantity(item.plan, item.point) if item.plan is not None else math.nan


def _of_step(quantity: Callable[[StepCost, Point], float]) -> Callable[[Measured], float]:
    return lambda item: quantity(item.step, item.point) if item.step is not None else math.nan


def _rows_handled(cost: PlanCost) -> float:
    """Rows of a batch that are looked up, that enter and that leave (as many)."""
    return cost.unique_rows + 2 * cost.entered_rows


PLAN_COLUMNS: Mapping[str, Callable[[Measured], float]] = {
    "plan ms": _of_plan(lambda cost, point: cost.plan_ms),
    "± ms": _of_plan(lambda cost, point: cost.spread_ms / 2),
    "ns per id": _of_plan(lambda cost, point: cost.plan_ms * 1e6 / point.ids),
    "ns per row": _of_plan(lambda cost, point: cost.plan_ms * 1e6 / _rows_handled(cost)),
    "plan / sort": _of_plan(lambda cost, point: cost.plan_ms / cost.sort_ms),
    "unique rows": _of_plan(lambda cost, point: cost.unique_rows),
    "rows entered": _of_plan(lambda cost, point: cost.entered_rows),
    "fetched MB": _of_plan(lambda cost, point: cost.fetched_mb),
    "plan MB": _of_plan(lambda cost, point: cost.plan_mb),
    "planner MB": _of_plan(lambda cost, point: cost.planner_mb),
}
STEP_COLUMNS: Mapping[str, Callable[[Measured], float]] = {
    "step ms": _of_step(lambda cost, point: cost.step_ms),
    "µs per example": _of_step(lambda cost, point: cost.step_ms * 1e3 / point.batch_size),
    "exposed ms": _of_step(lambda cost, point: cost.exposed_ms),
    "unique rows": _of_step(lambda cost, point: cost.unique_rows),
    "hit rate": _of_step(lambda cost, point: cost.hit_rate),
    "peak memory MB": _of_step(lambda cost, point: cost.peak_rss_mb),
}

#: Curve -> quantity -> the largest exponent: 1 is linear, 0 flat, 0.1 for what brings some more distinct rows.
#: Memory of bounded tables is left out: it is meant to grow up to a limit.
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
#: Quantities that no power law is asked of.
_NO_LAW = ("± ms", "plan / sort", "hit rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``y ~ x ** exponent`` over a whole curve; `steepest` of all neighbouring points, from `low` to `high`."""

    exponent: float
    steepest: float
    low: int
    high: int


def fit(items: Sequence[Measured], quantity: Callable[[Measured], float]) -> Fit | None:
    """The power law of a curve, or None where a quantity is 0 or missing, or there are not two points."""
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


def _by_curve(items: Sequence[Measured]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for item in items:
        found.setdefault(item.curve, []).append(item)
    return found


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def markdown(plans: Sequence[Measured], steps: Sequence[Measured]) -> str:
    """Every exponent, then every point."""
    parts = [
        ("Planning", plans, PLAN_COLUMNS, PLAN_WANTED),
        ("Training steps", steps, STEP_COLUMNS, STEP_WANTED),
    ]
    lines = []
    for title, items, columns, wanted in parts:
        if items:
            lines += [f"## {title}: exponents\n", _exponents(items, columns, wanted)]
    for title, items, columns, _ in parts:
        for name, curve in _by_curve(items).items():
            lines += [f"## {title}: {name}\n", _points(curve, columns)]
    return "\n".join(lines)


def summary(plans: Sequence[Measured], steps: Sequence[Measured], machine: Mapping[str, str]) -> str:
    """What was wanted and what was found, for the README: the exponents that have a bound."""
    lines = [f"{', '.join(f'{name} {value}' for name, value in machine.items())}.\n"]
    lines += ["Planning:\n", _exponents(plans, PLAN_COLUMNS, PLAN_WANTED, only_wanted=True)]
    if steps:
        lines += ["Training steps:\n", _exponents(steps, STEP_COLUMNS, STEP_WANTED, only_wanted=True)]
    return "\n".join(lines)


def _exponents(
    items: Sequence[Measured],
    columns: Mapping[str, Callable[[Measured], float]],
    wanted: Mapping[str, Mapping[str, float]],
    *,
    only_wanted: bool = False,
) -> str:
    lines = ["| curve | quantity | from … to | exponent | wanted at most | steepest part |", "|---" * 6 + "|"]
    for name, curve in _by_curve(items).items():
        for column, quantity in columns.items():
            found = fit(curve, quantity)
            bound = wanted.get(name, {}).get(column)
            if found is None or column in _NO_LAW or (only_wanted and bound is None):
                continue
            verdict = ""
            if bound is not None:
                verdict = f"{bound:g}: {'met' if found.exponent <= bound + TOLERANCE else 'missed'}"
            good = [item for item in curve if not item.error]
            ends = (
                f"{good[0].value:,}: {_number(quantity(good[0]))} … {good[-1].value:,}: {_number(quantity(good[-1]))}"
            )
            lines.append(
                f"| {name} | {column} | {ends} | {found.exponent:+.2f} | {verdict} "
                f"| {found.steepest:+.2f}, {found.low:,} to {found.high:,} |"
            )
    return "\n".join(lines) + "\n"


def _points(curve: Sequence[Measured], columns: Mapping[str, Callable[[Measured], float]]) -> str:
    lines = [f"| {curve[0].x.replace('_', ' ')} | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for item in curve:
        cells = [item.error] if item.error else [_number(quantity(item)) for quantity in columns.values()]
        lines.append(f"| {item.value:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def from_json(value: Any) -> tuple[list[Measured], list[Measured]]:
    """Points of planning and of training out of a file written from `to_json`."""
    return tuple(  # type: ignore[return-value]
        [
            Measured(
                curve=item["curve"],
                x=item["x"],
                point=Point(**item["point"]),
                plan=PlanCost(**item["plan"]) if item["plan"] else None,
                step=StepCost(**item["step"]) if item["step"] else None,
                error=item["error"],
            )
            for item in value[kind]
        ]
        for kind in ("plans", "steps")
    )


def to_json(plans: Sequence[Measured], steps: Sequence[Measured], machine: Mapping[str, str]) -> Any:
    """All that was measured, as plain values."""
    return {
        "machine": dict(machine),
        "plans": [asdict(item) for item in plans],
        "steps": [asdict(item) for item in steps],
    }


def draw(plans: Sequence[Measured], path: Path) -> None:
    """Nanoseconds per id, per row handled, and memory of the planner over each variable. Needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "scale"  # the same figures give the same file
    curves = _by_curve([item for item in plans if not item.error])
    columns = 4
    figure, axes = pyplot.subplots(math.ceil(len(curves) / columns), columns, figsize=(17, 8), squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (name, curve) in zip(axes.flat, curves.items(), strict=False):
        xs = [item.value for item in curve]
        for column, style in (("ns per id", "o-"), ("ns per row", "s--"), ("planner MB", "^:")):
            values = [PLAN_COLUMNS[column](item) for item in curve]
            axis.plot(xs, values, style, label=column)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel(curve[0].x.replace("_", " "))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(10, 5000)
        axis.grid(visible=True, which="both", alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def median_of(runs: Sequence[Measured]) -> Measured:
    """The run of one point whose cost is the median (of an even number the cheaper one)."""
    good = sorted((run for run in runs if not run.error), key=lambda run: _cost(run))
    return good[(len(good) - 1) // 2] if good else runs[0]


def _cost(run: Measured) -> float:
    return run.plan.plan_ms if run.plan is not None else run.step.step_ms if run.step is not None else math.inf
