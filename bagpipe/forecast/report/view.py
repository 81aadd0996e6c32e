"""`SweepView`: what the report shows of a sweep: the front, the points to look at closely, gains, reasons.

Points ──pareto_front, recommend──> front ──closest look──> at most 100 of it ──what_if──> gains of each
       └─cannot run──> reasons, grouped
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.forecast.axes import AXES, Axis
from bagpipe.forecast.forecast import Forecast
from bagpipe.forecast.pareto import Recommendation, pareto_front, recommend
from bagpipe.forecast.sweep import Point
from bagpipe.forecast.what_if import Gain, what_if

__all__ = ["Reason", "SweepView", "best_gain", "forecast_of", "label", "view_of"]

#: Points of the front that the report's lists and tables have: more would be no help to choose.
_MOST = 100
#: Share of the step by which a purchase must shorten it to be named.
_WORTH = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why points cannot run.

    Attributes:
        text: of the first of them; the others differ in numbers only.
        points: all of them.
    """

    text: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """A sweep as the report shows it.

    Attributes:
        cluster, replay, model: names, as texts.
        points: all.
        front_size: points that no other beats.
        front: those that are shown, by time.
        best: of the whole front.
        gains: of each point of `front`.
        reasons: the most frequent first.
        varied: axes in which points differ; at least one axis.
    """

    cluster: str
    replay: str
    model: str
    points: tuple[Point, ...]
    front_size: int
    front: tuple[Point, ...]
    best: Recommendation
    gains: tuple[tuple[Gain, ...], ...]
    reasons: tuple[Reason, ...]
    varied: tuple[Axis, ...]


def view_of(points: Sequence[Point], *, cluster: str, replay: str, model: str) -> SweepView:
    """Choose what is shown.

    Raises:
        InputError: no point can run.
    """
    front = pareto_front(points)
    if not front:
        raise InputError(f"no job of the grid can run: {next((point.error for point in points), 'it is empty')}")
    best = recommend(front)
    shown = _thinned(front, (best.fastest, best.cheapest, best.knee))
    jobs = [(point.cluster, point.job, forecast_of(point)) for point in shown if point.job is not None]
    varied = tuple(axis for axis in AXES if len({point.settings[axis.name] for point in points}) > 1)
    return SweepView(
        cluster=cluster,
        replay=replay,
        model=model,
        points=tuple(points),
        front_size=len(front),
        front=shown,
        best=best,
        gains=tuple(what_if(jobs)),
        reasons=_reasons(points),
        varied=varied or AXES[:1],
    )


def forecast_of(point: Point) -> Forecast:
    """The forecast of a point that can run."""
    assert point.forecast is not None, "points of the front can run"
    return point.forecast


def label(point: Point, axes: Sequence[Axis]) -> str:
    """The settings of a point in words: ``batch 1024, ranks 4``."""
    return ", ".join(f"{axis.title} {axis.text(point.settings[axis.name])}" for axis in axes)


def best_gain(gains: Sequence[Gain]) -> Gain | None:
    """The purchase with which the step is shortest; None: none shortens it."""
    possible = [gain for gain in gains if gain.faster is not None and gain.faster > 1 + _WORTH]
    return max(possible, key=lambda gain: gain.faster or 0.0, default=None)


def _thinned(front: Sequence[Point], kept: Sequence[Point]) -> tuple[Point, ...]:
    """At most `_MOST` points at even distances, and those that must be kept."""
    if len(front) <= _MOST:
        return tuple(front)
    wanted = {id(front[number * (len(front) - 1) // (_MOST - 1)]) for number in range(_MOST)}
    wanted |= {id(point) for point in kept}
    return tuple(point for point in front if id(point) in wanted)


def _reasons(points: Sequence[Point]) -> tuple[Reason, ...]:
    """Errors that differ in numbers only are one reason."""
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.error:
            found.setdefault(re.sub(r"\d[\d.e+]*", "N", point.error), []).append(point)
    ordered = sorted(found.values(), key=len, reverse=True)
    return tuple(Reason(text=own[0].error, points=tuple(own)) for own in ordered)
