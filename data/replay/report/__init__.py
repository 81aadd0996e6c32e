"""The report of a replay: one HTML file that needs no network, for a person who decides on cache, window and policy.

records ──sweep_charts, table_charts, trial_charts──> Chart: figures as plain data, one per choice ──┐
        ──tables──> sortable HTML tables                                                             ├─page──> HTML
report.css, report.js, plotly.min.js ────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from pathlib import Path

from bagpipe.util.outputs import write_whole
from data.replay.records import Replay
from data.replay.report.page import render_page

__all__ = ["write_report"]


def write_report(path: Path, replay: Replay) -> None:
    """Write the report. Equal input gives equal bytes; a reader never sees half a file.

    Raises:
        JobError: the file cannot be written.
    """
    # A path of the file system may hold bytes that are no text: they are shown as escapes.
    write_whole(str(path), render_page(replay).encode("utf-8", "backslashreplace"))
