"""The report of a replay: one HTML file without network access, for choosing cache, window and policy.

records ──sweep_charts, skew_chart, trial_charts──> Chart: figures as plain data, one per choice ──┐
        ──html_tables──> sortable HTML tables                                                      ├─page──> HTML
report.css, report.js, plotly.min.js ──────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from pathlib import Path

from bagpipe.util.outputs import write_whole
from data.replay.records import Replay
from data.replay.report.page import render_page

__all__ = ["write_report"]


def write_report(path: Path, replay: Replay) -> None:
    """Write the report. Equal input gives equal bytes; the file appears when complete.

    Raises:
        JobError: the file cannot be written.
    """
    # A path can hold bytes that are not text; they appear as escapes.
    write_whole(str(path), render_page(replay).encode("utf-8", "backslashreplace"))
