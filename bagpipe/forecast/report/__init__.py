"""The report of a sweep: one HTML file that says what to rent, what limits it and what to buy next.

Points ──view──> front, recommendation, gains of purchases ──charts, tables──> sections ──page──> HTML
"""

from __future__ import annotations

from pathlib import Path

from bagpipe.forecast.report.page import render_page
from bagpipe.forecast.report.view import SweepView
from bagpipe.report.page import write_page

__all__ = ["write_report"]


def write_report(path: Path, view: SweepView) -> None:
    """Write the report. Equal input gives equal bytes; the file appears when complete.

    Raises:
        JobError: the file cannot be written.
    """
    write_page(path, render_page(view))
