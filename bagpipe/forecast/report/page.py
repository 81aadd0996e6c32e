"""The page: recommendation, points, operations, purchases, front and reasons in the frame of `bagpipe.report.page`."""

from __future__ import annotations

from bagpipe.forecast.axes import AXES
from bagpipe.forecast.report.charts import gains_chart, operations_chart, points_chart
from bagpipe.forecast.report.tables import front_table, gains_table, reasons_table
from bagpipe.forecast.report.view import SweepView, best_gain, forecast_of, label
from bagpipe.forecast.sweep import Point
from bagpipe.report.page import Page, chart_html, render, section
from bagpipe.report.tables import escape

__all__ = ["render_page"]

_STYLE = """#recommended h3 { margin-top: .75rem; }
#recommended h3 span { font-weight: 400; }
"""


def render_page(view: SweepView) -> str:
    """The whole report as text."""
    points, operations, gains = points_chart(view), operations_chart(view), gains_chart(view)
    left_out = (
        f"<p>{len(view.front):,} of the {view.front_size:,} points that no other one beats, at even distances.</p>"
        if len(view.front) < view.front_size
        else ""
    )
    sections = (
        section("Points", [chart_html(points), chart_html(operations)]),
        section("What to buy next", [chart_html(gains), gains_table(view)]),
        section("Points that no other one beats", [left_out, front_table(view)]),
        section("Points that cannot run", [_failures(view), reasons_table(view)]),
    )
    page = Page(
        title=f"Sweep on {view.cluster}",
        header=f"<h1>Sweep on <code>{escape(view.cluster)}</code></h1>\n<p>{_inputs(view)}</p>",
        lead=_recommendation(view),
        body="\n".join(each for each in sections if each),
        footer="<p>Forecasts of the steady state, not measurements: docs/forecast.md says what is not simulated.</p>",
        charts=[points, operations, gains],
        style=_STYLE,
    )
    return render(page)


def _inputs(view: SweepView) -> str:
    possible = sum(point.forecast is not None for point in view.points)
    return (
        f"Rows of <code>{escape(view.replay)}</code>, dense part of <code>{escape(view.model)}</code>; "
        f"{len(view.points):,} points, {possible:,} can run, {view.front_size:,} that no other one beats in time, "
        "device memory and price."
    )


def _recommendation(view: SweepView) -> str:
    knee = view.best.knee
    named = (
        ("recommended", "nearest to the best time, memory and price of the front", knee),
        ("fastest", "least time of an example", view.best.fastest),
        ("cheapest", "least price of an example", view.best.cheapest),
    )
    of_points: dict[int, list[tuple[str, str, Point]]] = {}
    for each in named:
        of_points.setdefault(id(each[2]), []).append(each)
    parts = [
        _named(view, " and ".join(name for name, *_ in own), "; ".join(why for _, why, _ in own), own[0][2])
        for own in of_points.values()
    ]
    return (
        f'<section id="recommended">\n<h2>Recommended: {escape(label(knee, AXES))}</h2>\n'
        f"{''.join(parts)}{_flags(knee)}</section>"
    )


def _named(view: SweepView, name: str, why: str, point: Point) -> str:
    found = forecast_of(point)
    gain = best_gain(view.gains[next(place for place, each in enumerate(view.front) if each is point)])
    figures = (
        (f"{1e6 / found.examples_per_s:,.4g} s", "a million examples"),
        (f"$ {found.usd_per_million_examples:.3g}", "a million examples"),
        (f"{sum(found.device_bytes.values()) / 1e9:.3g} GB", "on a device"),
        (f"{found.step_s * 1e3:.4g} ms", "a step"),
    )
    items = "".join(f"<div><dd>{escape(value)}</dd><dt>{what}</dt></div>" for value, what in figures)
    buys = (
        "nothing alone makes it faster"
        if gain is None
        else f"twice the {gain.purchase} makes it {gain.faster:.2f} x as fast"
    )
    return (
        f"<h3>{name.capitalize()} <span>({why}): {escape(label(point, view.varied))}</span></h3>\n"
        f'<dl class="key">{items}</dl>\n<p>Limit: {escape(found.limit)}; {escape(buys)}.</p>\n'
    )


def _flags(point: Point) -> str:
    """The trainer's flags for the job's part of the settings; direct mode has others."""
    settings = point.settings
    if settings["policy"] == "direct":
        return ""
    flags = f"--oracle.policy {settings['policy']} --oracle.lookahead {settings['lookahead']}"
    flags += f" --cache.rows {settings['cache_rows']} --data.batch_size {settings['batch_examples']}"
    return f"<pre><code>{escape(flags)}</code></pre>\n"


def _failures(view: SweepView) -> str:
    failed = sum(len(reason.points) for reason in view.reasons)
    return f'<p class="failed">{failed:,} of {len(view.points):,} points cannot run.</p>' if failed else ""
