"""The page: recommendation, sweep, skew, trials, records and machine in the frame of `bagpipe.report.page`."""

from __future__ import annotations

from pathlib import Path

from bagpipe.report.charts import short
from bagpipe.report.page import Page, chart_html, render, section
from bagpipe.report.tables import cell_data, escape
from data.replay.records import Replay, ReplayRecord
from data.replay.report.html_tables import (
    is_setting,
    limit_table,
    moved_of,
    record_table,
    skew_table,
    threshold_table,
    trial_table,
)
from data.replay.report.skew_chart import skew_chart
from data.replay.report.sweep_charts import bounds_of, refetch_ratio, sweep_charts
from data.replay.report.trial_charts import trial_charts

__all__ = ["render_page"]

#: The key figure that follows the reader's link.
LINK_FIGURE = "for it on your link"

_FOLDER = Path(__file__).parent


def render_page(replay: Replay) -> str:
    """The whole report as text."""
    sweep = sweep_charts(replay) if replay.records else []
    skew = [skew_chart(replay.skew)] if replay.skew else []
    trials = trial_charts(replay.trials)
    sections = [
        section("Sweep", [chart_html(chart) for chart in sweep]),
        section(
            "Tables of the data", [*(chart_html(chart) for chart in skew), skew_table(replay.skew)] if skew else []
        ),
        section("Thresholds and limits for rows", [threshold_table(replay), limit_table(replay)]),
        section(
            "Training trials", [*(chart_html(chart) for chart in trials), trial_table(replay)] if replay.trials else []
        ),
        section("All settings", [_failures(replay), record_table(replay)] if replay.records else []),
    ]
    name = replay.path or f"{replay.format} data"
    page = Page(
        title=f"Replay of {name}",
        header=f"<h1>Replay of <code>{escape(name)}</code></h1>\n<p>{_log(replay)}</p>",
        lead=f"{_recommendation(replay)}\n{_link(replay)}",
        body="\n".join(each for each in sections if each),
        footer=_machine(replay),
        charts=[*sweep, *skew, *trials],
        style=_asset("link.css"),
        script=_asset("link.js"),
    )
    return render(page)


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


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
    if best is None and not replay.records:
        return ""
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
