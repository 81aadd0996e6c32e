"""Tables in a benchmark's README: what stands between two marks comes from its results."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BEGIN", "END", "fill_in"]

BEGIN, END = "<!-- tables -->", "<!-- end -->"


def fill_in(readme: Path, tables: str) -> None:
    """Put the tables between the marks. ValueError if a mark is missing or there twice."""
    before, rest = readme.read_text().split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{tables}{END}{after}")
