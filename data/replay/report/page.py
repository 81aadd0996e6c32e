"""The page: recommendation, sweep, skew, trials, records and machine in one file that loads nothing.

The chart library, 4.8 MB, is included unchanged. Tables and texts are plain HTML and need no script. External texts are
escaped for their place: HTML, JSON inside HTML, plotly's labels.
"""

from __future__ import annotations

import json
from pathlib import Path

from plotly.offline import get_plotlyjs

from data.replay.records import Replay, ReplayRecord
from data.replay.report.charts import Chart, Json, short
from data.replay.report.html_tables import (
    cell_data,
    escape,
    is_setting,
    moved_of,
    record_table,
    skew_table,
    trial_table,
)
from data.replay.report.skew_chart import skew_chart
from data.replay.report.sweep_charts import bounds_of, refetch_ratio, sweep_charts
from data.replay.report.trial_charts import trial_charts

__all__ = ["render_page"]

#: The key figure that follows the reader's link.
LINK_FIGURE = "for it on your link"

_FOLDER = Path(__file__).parent

#: The page loads nothing. Scripts and styles are inline; images come from the charts.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def render_page(replay: Replay) -> str:
    """The whole report as text."""
    sweep = sweep_charts(replay)
    skew = [skew_chart(replay.skew)] if replay.skew else []
    trials = trial_charts(replay.trials)
    sections = [
        _section("Sweep", [_chart(chart) for chart in sweep]),
        _section("Tables of the data", [*(_chart(chart) for chart in skew), skew_table(replay.skew)] if skew else []),
        _section(
            "Training trials", [*(_chart(chart) for chart in trials), trial_table(replay)] if replay.trials else []
        ),
        _section("All settings", [_failures(replay), record_table(replay)]),
    ]
    body = "\n".join(section for section in sections if section)
    name = escape(replay.path or f"{replay.format} data")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>Replay of {name}</title>
<style>
{_asset("report.css")}</style>
</head>
<body>
<header>
<h1>Replay of <code>{name}</code></h1>
<p>{_log(replay)}</p>
</header>
<main>
{_recommendation(replay)}
{_link(replay)}
<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>
{body}
</main>
<footer>
{_machine(replay)}
<p>Charts by plotly.js, Copyright 2012-2026, Plotly, Inc., MIT license, included here. This file loads nothing.</p>
</footer>
<script type="application/json" id="figures">{_figures([*sweep, *skew, *trials])}</script>
<script id="library">{get_plotlyjs()}</script>
<script>
{_asset("report.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _figures(charts: list[Chart]) -> str:
    """All charts as JSON, escaped so that it cannot close its script element."""
    value: dict[str, Json] = {
        chart.name: {
            "choices": [
                {"name": choice.name, "options": list(choice.options), "default": choice.default}
                for choice in chart.choices
            ],
            "figures": {",".join(map(str, key)): figure for key, figure in chart.figures.items()},
        }
        for chart in charts
    }
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _section(title: str, parts: list[str]) -> str:
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def _chart(chart: Chart) -> str:
    lists = "".join(
        f'<label>{escape(choice.label)} <select data-choice="{choice.name}">'
        + "".join(
            f'<option value="{number}"{" selected" if number == choice.default else ""}>{escape(option)}</option>'
            for number, option in enumerate(choice.options)
        )
        + "</select></label>"
        for choice in chart.choices
        if len(choice.options) > 1
    )
    choices = f'<div class="choices">{lists}</div>' if lists else ""
    return (
        f'<figure id="{chart.name}">\n<h3>{escape(chart.title)}</h3>\n<p>{escape(chart.note)}</p>\n{choices}'
        f'<div class="plot"></div>\n</figure>'
    )


def _link(replay: Replay) -> str:
    """The inputs for seconds instead of bytes."""
    if not any(record.link_s is not None for record in replay.records):
        return ""
    widths = {record.row_bytes for record in replay.records if record.error is None}
    own = widths.pop() if len(widths) == 1 else None
    shown = own if replay.link.row_bytes is None else replay.link.row_bytes
    value, model = ("" if width is None else f"{width:g}" for width in (shown, own))
    rows = f"rows of the replayed model, {own} B each" if own is not None else "rows as wide as their tables"
    return (
        '<form id="link">\n<h2>Your link and model</h2>\n'
        '<label>Link to the store <input name="bandwidth" inputmode="decimal" '
        f'value="{replay.link.bytes_per_s / 1e9:g}">'
        " GB/s</label>\n"
        f'<label>A row, with optimizer state <input name="row_bytes" inputmode="decimal" value="{value}" '
        f'data-model="{model}" placeholder="by table"> B</label>\n'
        f"<p>For the times in the tables and in the chart of the traffic. Rows are fetched and written one after the "
        f"other. Defaults: 10 Gbit/s, or <code>--bandwidth</code>; {rows}, or <code>--row_bytes</code>. A step is not "
        "delayed if the time of a batch is less than its computation.</p>\n</form>"
    )


def _log(replay: Replay) -> str:
    return (
        f"{escape(replay.format)}: {replay.examples:,} examples in {replay.batches:,} batches; {replay.ids:,} ids of "
        f"{replay.rows:,} distinct rows; {len(replay.records):,} settings replayed through the cache's planner, "
        "without training."
    )


def _recommendation(replay: Replay) -> str:
    best = replay.recommended
    if best is None:
        why = escape(replay.reason) or "No setting could be replayed; the errors are in the table below."
        return f'<section id="recommended" class="none">\n<h2>No recommendation</h2>\n<p>{why}</p>\n</section>'
    flags = f"--oracle.policy {best.policy} --oracle.lookahead {best.lookahead}"
    flags += f" --cache.rows {best.cache_rows} --data.batch_size {best.batch_size}"
    ranks = f", {best.world_size} ranks" if best.world_size > 1 else ""
    found = [r for r in replay.records if is_setting(r, best) and r.error is None]
    return (
        f'<section id="recommended">\n<h2>Recommended: {escape(best.policy)}, lookahead {best.lookahead:,}, '
        f"cache of {best.cache_rows:,} rows{' per rank' if ranks else ''}, batch size {best.batch_size:,}{ranks}</h2>\n"
        f"<p>{escape(replay.reason)}</p>\n{_key_figures(replay, found[0]) if found else ''}"
        f"<pre><code>{escape(flags)}</code></pre>\n</section>"
    )


def _key_figures(replay: Replay, record: ReplayRecord) -> str:
    figures = []
    if record.hit_rate is not None:
        figures.append((f"{record.hit_rate:.2%}", "hit rate"))
    ratio = refetch_ratio(record, bounds_of(replay.records))
    if ratio is not None:
        figures.append((f"{ratio:.3f} ×", "re-fetches of offline Belady"))
    if record.bytes_fetched is not None and record.bytes_written is not None and record.batches:
        moved = (record.bytes_fetched + record.bytes_written) / record.batches
        figures.append((f"{short(moved)}B", "fetched + written per batch"))
    if record.link_s is not None and record.batches:
        figures.append((f"{record.link_s * 1e3 / record.batches:.4g} ms", LINK_FIGURE))
    if record.row_bytes is not None:
        figures.append((f"{short(record.row_bytes * record.cache_rows)}B", "cache memory per rank"))
    moved_data = cell_data(moved_of(record))
    items = "".join(
        f"<div><dd{moved_data if name == LINK_FIGURE else ''}>{escape(value)}</dd><dt>{name}</dt></div>"
        for value, name in figures
    )
    return f'<dl class="key">{items}</dl>\n'


def _failures(replay: Replay) -> str:
    failed = sum(record.error is not None for record in replay.records)
    if not failed:
        return ""
    return f'<p class="failed">{failed:,} of {len(replay.records):,} settings failed; they are marked red.</p>'


def _machine(replay: Replay) -> str:
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in replay.machine.items())
    return f'<h2>Measured on</h2>\n<dl class="machine">{items}</dl>' if items else ""
