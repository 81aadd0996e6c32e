"""The report of a replay: one HTML file without network access, for choosing cache, window and policy.

records ──sweep_charts, skew_chart, trial_charts──> Chart: figures as plain data, one per choice ──┐
        ──html_tables──> sortable HTML tables                                                      ├─page──> HTML
link.css, link.js: times on the reader's link ─────────────────────────────────────────────────────┘

Policies have their colours and markers from looks. The frame, the forms of charts and tables, and what draws and sorts
them are `bagpipe.report`.
"""

from __future__ import annotations

from pathlib import Path

from bagpipe.report.page import write_page
from data.replay.records import Replay
from data.replay.report.page import render_page

__all__ = ["write_report"]


def write_report(path: Path, replay: Replay) -> None:
    """Write the report. Equal input gives equal bytes; the file appears when complete.

    Raises:
        JobError: the file cannot be written.
    """
    write_page(path, render_page(replay))
