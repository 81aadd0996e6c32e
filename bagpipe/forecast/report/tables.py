"""Tables of a sweep: the front, what each purchase does to its points, and why points cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from bagpipe.forecast.axes import AXES, Axis
from bagpipe.forecast.report.view import Reason, SweepView, best_gain, forecast_of
from bagpipe.forecast.sweep import Point
from bagpipe.forecast.what_if import PURCHASES, Gain
from bagpipe.report.tables import Column, table

__all__ = ["front_table", "gains_table", "reasons_table"]

T = TypeVar("T")
_Gained: TypeAlias = tuple[Point, dict[str, Gain]]


def front_table(view: SweepView) -> str:
    """The front, by time; the recommended point is marked."""
    columns: list[Column[Point]] = [
        *(_axis_column(axis, _itself) for axis in AXES),
        Column(title="step ms", value=lambda p: forecast_of(p).step_s * 1e3, text=_four),
        Column(title="examples/s", value=lambda p: forecast_of(p).examples_per_s, text=lambda value: f"{value:,.0f}"),
        Column(
            title="s / M", value=lambda p: 1e6 / forecast_of(p).examples_per_s, text=_four, hint="a million examples"
        ),
        Column(
            title="$ / M",
            value=lambda p: forecast_of(p).usd_per_million_examples,
            text=_three,
            hint="a million examples",
        ),
        Column(
            title="GB", value=lambda p: sum(forecast_of(p).device_bytes.values()) / 1e9, text=_three, hint="on a device"
        ),
        Column(title="limit", value=lambda p: forecast_of(p).limit, hint="operation with the largest share: resource"),
    ]
    return table("front", columns, view.front, setting_columns=len(AXES), is_best=lambda p: p is view.best.knee)


def gains_table(view: SweepView) -> str:
    """One row a point: which purchase helps most, and the change of step time and price with each."""
    gained = [(point, {gain.purchase: gain for gain in own}) for point, own in zip(view.front, view.gains, strict=True)]
    columns: list[Column[_Gained]] = [
        *(_axis_column(axis, _point_of) for axis in view.varied),
        Column(title="step ms", value=lambda item: forecast_of(item[0]).step_s * 1e3, text=_four, hint="as it is"),
        Column(
            title="helps most",
            value=lambda item: _best(list(item[1].values())),
            hint="the resource whose double shortens the step most",
        ),
    ]
    for purchase in PURCHASES:
        columns.append(_change_column(purchase.name, "step", _step_change))
        if purchase.is_priced:
            columns.append(_change_column(purchase.name, "price", _price_change))
    return table(
        "gains-of-points",
        columns,
        gained,
        setting_columns=len(view.varied) + 2,
        is_best=lambda item: item[0] is view.best.knee,
    )


def reasons_table(view: SweepView) -> str:
    """Why points cannot run, the most frequent reason first."""
    columns: list[Column[Reason]] = [
        Column(title="reason", value=lambda reason: reason.text, hint="of the first point; others differ in numbers"),
        Column(title="points", value=lambda reason: len(reason.points)),
        *(_values_column(axis) for axis in view.varied),
    ]
    return table("reasons", columns, view.reasons, setting_columns=2) if view.reasons else ""


def _itself(point: Point) -> Point:
    return point


def _point_of(item: _Gained) -> Point:
    return item[0]


def _axis_column(axis: Axis, point_of: Callable[[T], Point]) -> Column[T]:
    return Column(
        title=axis.title, value=lambda item: point_of(item).settings[axis.name], text=axis.text, hint=axis.hint
    )


def _values_column(axis: Axis) -> Column[Reason]:
    return Column(title=axis.title, value=lambda reason: _values(reason.points, axis), hint=axis.hint)


def _change_column(name: str, what: str, change: Callable[[Gain], float | None]) -> Column[_Gained]:
    def value(item: _Gained) -> float | None:
        gain = item[1].get(name)
        return None if gain is None else change(gain)

    return Column(
        title=f"2 x {name}: {what}", value=value, text=lambda ratio: f"{ratio:+.1%}", hint=f"change of the {what}"
    )


def _step_change(gain: Gain) -> float | None:
    return 1 / gain.faster - 1 if gain.faster else None


def _price_change(gain: Gain) -> float | None:
    return None if gain.dearer is None else gain.dearer - 1


def _best(gains: Sequence[Gain]) -> str:
    best = best_gain(gains)
    return "nothing alone" if best is None else best.purchase


def _values(points: Sequence[Point], axis: Axis) -> str:
    """The values of an axis among points, at most four."""
    values = list(dict.fromkeys(point.settings[axis.name] for point in points))
    shown = ", ".join(axis.text(value) for value in values[:4])
    return f"{shown}, … ({len(values)})" if len(values) > 4 else shown


def _four(value: float) -> str:
    return f"{value:,.4g}"


def _three(value: float) -> str:
    return f"{value:.3g}"
