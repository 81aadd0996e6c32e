"""Results as Markdown between two marks of a README: tables, the machine, and the run of each part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["BEGIN", "END", "fill_in", "provenance", "table", "verdict"]

BEGIN, END = "<!-- tables -->", "<!-- end -->"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell. ValueError: a row has more or fewer cells than there are headers."""
    lines = [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"expected {len(headers)} cells, got {len(row)}: {row}")
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |")
    return "\n".join(lines) + "\n"


def verdict(value: float, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """Whether a target is met."""
    is_met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return "met" if is_met else "missed"


def fill_in(readme: Path, text: str) -> None:
    """Put the text between the marks. ValueError if a mark is missing or there twice."""
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{text.strip()}\n{END}{after}", encoding="utf-8")


def provenance(values: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the machine, on parts that did not end well, and on the runs that measured the parts."""
    if values["rehearsed"]:
        yield "**A rehearsal with tiny sizes. These are no measurements.**\n"
    for name, part in values["parts"].items():
        if "error" in part:
            yield f"**Part {name} failed: {part['error']}**\n"
        if "seconds" not in part:
            yield f"**Part {name} was interrupted: what is missing here was not measured.**\n"
    yield f"* {'; '.join(f'{name}: {text}' for name, text in values['machine'].items())}"
    runs: dict[str, list[str]] = {}
    for name, part in values["parts"].items():
        runs.setdefault("; ".join(_run(part["run"])), []).append(name)
    yield from (f"* {', '.join(names)}: {text}" for text, names in runs.items() if text)


def _run(run: Mapping[str, Any]) -> Iterator[str]:
    """The known facts of a run. Results that predate the harness lack some."""
    if "command" in run:
        yield f"`{run['command']}`"
    yield from (f"{name} {run[name]}" for name in ("code", "load average") if name in run)
    yield from run.get("notes", ())
