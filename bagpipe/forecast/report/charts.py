"""Charts of a sweep: all points by time and price or memory, one point's operations, and what each purchase does to it.

The reader chooses a point of the front from a list, or by a click in the first chart; the other two follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagpipe.forecast.forecast import Forecast
from bagpipe.forecast.report.view import SweepView, forecast_of, label
from bagpipe.forecast.sweep import Point
from bagpipe.forecast.what_if import Gain
from bagpipe.report.charts import Chart, Choice, Figure, Json, Look, finite, plain, value_axis

__all__ = ["gains_chart", "operations_chart", "points_chart"]

#: Looks of limits: Okabe and Ito's palette; the most frequent limits come first, and the eighth begins anew.
_LOOKS = tuple(
    Look(color=color, symbol=symbol)
    for color, symbol in (
        ("#0072b2", "circle"),
        ("#d55e00", "square"),
        ("#009e73", "diamond"),
        ("#cc79a7", "triangle-up"),
        ("#e69f00", "triangle-down"),
        ("#56b4e9", "cross"),
        ("#7f7f7f", "star"),
    )
)
#: Points beaten by others that are drawn: more would only slow the page down.
_OTHERS = 3000
#: Name of the reader's choice of a point.
_POINT = "point"


def _seconds(found: Forecast) -> float:
    return 1e6 / found.examples_per_s


#: Second axis of the points' chart, beside time: option, title, value.
_AGAINST: tuple[tuple[str, str, Callable[[Forecast], float]], ...] = (
    ("price", "$ of a million examples", lambda found: found.usd_per_million_examples),
    ("device memory", "GB on a device", lambda found: sum(found.device_bytes.values()) / 1e9),
)


def points_chart(view: SweepView) -> Chart:
    """Every point that can run, by time and price, or time and memory; the front is large, the others pale."""
    of_front = {id(point) for point in view.front}
    possible = [point for point in view.points if point.forecast is not None]
    others = [point for point in possible if id(point) not in of_front]
    drawn = others[:: -(-len(others) // _OTHERS) or 1]
    left_out = f" {len(drawn):,} of the {len(others):,} others are drawn." if len(drawn) < len(others) else ""
    free = not any(forecast_of(point).usd_per_million_examples for point in possible)  # a cluster without prices
    return Chart(
        name="points",
        title="Time against price and memory",
        note="Left and low is better. Large points are those that no other one beats in time, device memory and price "
        f"together; the colour is what limits a step.{left_out} Click a large point to see below what it consists of.",
        choices=(
            Choice(name="against", label="Against", options=tuple(name for name, *_ in _AGAINST), default=int(free)),
        ),
        figures={
            (number,): _points_figure(view, drawn, title, value) for number, (_, title, value) in enumerate(_AGAINST)
        },
    )


def _points_figure(view: SweepView, others: Sequence[Point], title: str, value: Callable[[Forecast], float]) -> Figure:
    """Two traces a limit, the most frequent limit first, with one name in the legend."""

    def place_of(point: Point) -> tuple[float, float]:
        return _seconds(forecast_of(point)), value(forecast_of(point))

    numbers = {id(point): number for number, point in enumerate(view.front)}
    groups: dict[str, tuple[list[Point], list[Point]]] = {}
    for is_front, points in enumerate((others, view.front)):
        for point in points:
            groups.setdefault(forecast_of(point).limit, ([], []))[is_front].append(point)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1][0]) - len(item[1][1]), item[0]))
    traces: list[Json] = []
    for group, (limit, both) in enumerate(ordered):
        look = _LOOKS[group % len(_LOOKS)]
        for is_front, points in enumerate(both):
            if points:
                traces.append(
                    {
                        "type": "scatter",
                        "mode": "markers",
                        "name": plain(limit),
                        "legendgroup": limit,
                        "showlegend": bool(is_front) or not both[1],
                        "x": [finite(place_of(point)[0]) for point in points],
                        "y": [finite(place_of(point)[1]) for point in points],
                        "customdata": [numbers.get(id(point)) for point in points],
                        "text": [_hover(view, point) for point in points],
                        "hovertemplate": "%{text}<extra></extra>",
                        "marker": {"color": look.color, "symbol": look.symbol, "size": 11 if is_front else 5},
                        "opacity": 1 if is_front else 0.35,
                        "zorder": is_front,
                    }
                )
    places = [place_of(point) for point in (*others, *view.front)]
    layout: dict[str, Json] = {
        "xaxis": _axis("seconds for a million examples", [x for x, _ in places]),
        "yaxis": _axis(title, [y for _, y in places]),
        "meta": {"choose": _POINT},
    }
    return {"data": traces, "layout": layout}


def _hover(view: SweepView, point: Point) -> str:
    found = forecast_of(point)
    lines = (
        label(point, view.varied),
        f"step {found.step_s * 1e3:.4g} ms, {found.examples_per_s:,.0f} examples/s",
        f"$ {found.usd_per_million_examples:.3g} a million",
        f"{sum(found.device_bytes.values()) / 1e9:.3g} GB on a device",
        f"limit: {found.limit}",
    )
    return "<br>".join(plain(line, 160) for line in lines)


def _axis(title: str, values: Sequence[float]) -> dict[str, Json]:
    """Logarithmic where the values span much."""
    is_log = min(values) > 0 and max(values) > 4 * min(values)
    return (
        value_axis(title, type="log", dtick=1 if max(values) > 100 * min(values) else "D2")
        if is_log
        else (value_axis(title, rangemode="tozero"))
    )


def _choice(view: SweepView) -> Choice:
    """The list of the front's points; the knee is the default."""
    return Choice(
        name=_POINT,
        label="Point",
        options=tuple(_option(view, point) for point in view.front),
        default=next(place for place, point in enumerate(view.front) if point is view.best.knee),
    )


def _option(view: SweepView, point: Point) -> str:
    found = forecast_of(point)
    figures = f"{found.step_s * 1e3:.4g} ms, $ {found.usd_per_million_examples:.3g} a million"
    return f"{figures}: {label(point, view.varied)}"


def operations_chart(view: SweepView) -> Chart:
    """Seconds of each operation of a point, and which of them the step consists of."""
    return Chart(
        name="operations",
        title="What a step consists of",
        note="Each bar is an operation of a batch on a rank. Those on the critical cycle are the step, with their "
        "share; the others are hidden behind them, and making them faster changes nothing.",
        choices=(_choice(view),),
        figures={(place,): _operations(forecast_of(point)) for place, point in enumerate(view.front)},
    )


def _operations(found: Forecast) -> Figure:
    ops = sorted((op for op, seconds in found.op_s.items() if seconds > 0), key=lambda op: found.op_s[op])
    kinds = (
        ("on the critical cycle", "#d55e00", [op for op in ops if found.shares.get(op, 0.0) > 0]),
        ("hidden", "#9a9a9a", [op for op in ops if not found.shares.get(op, 0.0) > 0]),
    )
    traces: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": own,
            "x": [finite(found.op_s[op] * 1e3) for op in own],
            "text": [f"{found.shares[op]:.0%}" if found.shares.get(op, 0.0) > 0 else "" for op in own],
            "textposition": "auto",
            "marker": {"color": color},
            "hovertemplate": "%{y}: %{x:.4~g} ms<extra></extra>",
        }
        for name, color, own in kinds
        if own
    ]
    layout: dict[str, Json] = {
        "xaxis": value_axis(
            f"milliseconds of a batch<br>step {found.step_s * 1e3:.4g} ms, limit {plain(found.limit)}",
            rangemode="tozero",
        ),
        "yaxis": value_axis("", categoryorder="array", categoryarray=ops),
        "height": 150 + 26 * len(ops),
        "barmode": "overlay",
    }
    return {"data": traces, "layout": layout}


def gains_chart(view: SweepView) -> Chart:
    """Step time and price of a point with twice of each resource."""
    return Chart(
        name="gains",
        title="Twice of one resource",
        note="The point with twice of one resource, forecast anew: change of the step time and of an example's price. "
        "Bars to the left are better. A resource that is not the limit changes nothing. Ports, links and devices have "
        "no price in a cluster file: their bars take the price per hour as it is, so the saving is what they may cost. "
        "Bars are cut at +100 %.",
        choices=(_choice(view),),
        figures={(place,): _gains(gains) for place, gains in enumerate(view.gains)},
    )


def _gains(gains: Sequence[Gain]) -> Figure:
    possible = [gain for gain in reversed(gains) if gain.faster]
    names = [_name(gain) for gain in possible]
    series = (
        ("step time", "#0072b2", [_change(1 / gain.faster) if gain.faster else None for gain in possible]),
        ("price of an example", "#e69f00", [_change(gain.dearer) for gain in possible]),
    )
    traces: list[Json] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": names,
            "x": values,
            "marker": {"color": color},
            "hovertemplate": f"%{{y}}: {name} %{{x:+.1%}}<extra></extra>",
        }
        for name, color, values in series
    ]
    drawn = [value for _, _, values in series for value in values if value is not None]
    low, high = min(drawn, default=0.0), min(max(drawn, default=0.0), 1.0)  # a job that is much slower hides the others
    layout: dict[str, Json] = {
        "xaxis": value_axis("change", tickformat="+.0%", range=[min(1.1 * low, -0.05), max(1.1 * high, 0.05)]),
        "yaxis": value_axis(""),
        "height": 150 + 40 * len(possible),
        "barmode": "group",
    }
    return {"data": traces, "layout": layout}


def _name(gain: Gain) -> str:
    return f"2 x {gain.purchase}"


def _change(ratio: float | None) -> float | None:
    return None if ratio is None else finite(round(ratio - 1, 6))
