"""`Page`: the frame of a report: head, styles, charts and scripts in one file that loads nothing.

The chart library, 4.8 MB, is included unchanged. Tables and texts are plain HTML and need no script. External texts are
escaped for their place: HTML, JSON inside HTML, plotly's labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plotly.offline import get_plotlyjs

from bagpipe.report.charts import Chart, Json
from bagpipe.report.tables import escape
from bagpipe.util.outputs import write_whole

__all__ = ["Page", "chart_html", "render", "section", "write_page"]

_FOLDER = Path(__file__).parent

#: The page loads nothing. Scripts and styles are inline; images come from the charts.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Parts of one report in the common frame.

    Attributes:
        title: of the window, as text.
        header, lead, body, footer: HTML: above all, before the note for readers without scripts, after it, below all.
        charts: those of `body`.
        style, script: CSS after that of all reports; JavaScript before the page is drawn.
    """

    title: str
    header: str
    lead: str
    body: str
    footer: str
    charts: Sequence[Chart]
    style: str = ""
    script: str = ""


def render(page: Page) -> str:
    """The whole report as text."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(page.title)}</title>
<style>
{_asset("report.css")}{page.style}</style>
</head>
<body>
<header>
{page.header}
</header>
<main>
{page.lead}
<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>
{page.body}
</main>
<footer>
{page.footer}
<p>Charts by plotly.js, Copyright 2012-2026, Plotly, Inc., MIT license, included here. This file loads nothing.</p>
</footer>
<script type="application/json" id="figures">{_figures(page.charts)}</script>
<script id="library">{get_plotlyjs()}</script>
<script>
{_asset("report.js")}{page.script}start();
</script>
</body>
</html>
"""


def write_page(path: Path, text: str) -> None:
    """Write a report. Equal input gives equal bytes; the file appears when complete.

    Raises:
        JobError: the file cannot be written.
    """
    # A path can hold bytes that are not text; they appear as escapes.
    write_whole(str(path), text.encode("utf-8", "backslashreplace"))


def section(title: str, parts: Iterable[str]) -> str:
    """Parts under a heading; nothing if all are empty.

    Args:
        title: HTML.
        parts: HTML.
    """
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>" if content else ""


def chart_html(chart: Chart) -> str:
    """The place of a chart, with the lists of its choices."""
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


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _figures(charts: Sequence[Chart]) -> str:
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
