"""`Chart`: the common parts of the reports' charts: choices, figures as plain data, colours, axes.

    a chart's figures:  choice of each option list ──> figure {"data": traces, "layout": axes} in plotly's form

Figures are complete, one per combination of choices; the page's script only selects one and adds what depends on the
reader's screen: colour scheme and legend position.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

__all__ = [
    "INK",
    "Chart",
    "Choice",
    "Figure",
    "Json",
    "Look",
    "count_axis",
    "distinct",
    "finite",
    "plain",
    "short",
    "value_axis",
]

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"
Figure: TypeAlias = dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An option list for the reader. Charts with a choice of the same name change together.

    Attributes:
        name: of the choice. label: shown before the list.
        options: texts. default: index of the option shown first.
    """

    name: str
    label: str
    options: tuple[str, ...]
    default: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart with all its figures.

    Attributes:
        name: its element's id. title: the quantities drawn. note: how to read it.
        choices: the reader's. figures: indexes of the chosen options -> figure; combinations without data are absent.
    """

    name: str
    title: str
    note: str
    figures: Mapping[tuple[int, ...], Figure]
    choices: tuple[Choice, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Colour, marker and line of a series."""

    color: str
    symbol: str
    dash: str = "solid"


#: Okabe and Ito's palette, for colour-blind readers. Markers differ too, for print. Black is the bound; the script
#: lightens it on dark screens. M. Okabe, K. Ito, "Color universal design", 2008.
INK = "#000000"


def plain(text: str, characters: int = 40) -> str:
    """Text that plotly draws literally (it interprets some HTML in names), truncated to keep the plot's size."""
    return html.escape(text if len(text) <= characters else text[: characters - 1] + "…", quote=False)


def distinct(values: Iterable[int]) -> list[int]:
    """Distinct values in ascending order."""
    return sorted(set(values))


def finite(value: float | None) -> float | None:
    """`value`, or None (a gap in the chart) for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def short(value: float) -> str:
    """``1500`` -> ``1.5 k``: at most three digits and a unit."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g}"


def count_axis(title: str, values: Sequence[int]) -> dict[str, Json]:
    """An axis of the reader's own positive counts: its ticks are these counts unless they are too dense."""
    axis: dict[str, Json] = {"title": {"text": title}, "automargin": True}
    if values and min(values) > 0 and max(values) >= 4 * min(values):
        axis["type"] = "log"
        near = any(b < 1.25 * a for a, b in pairwise(values))
    else:
        near = False
    if len(values) <= 8 and not near:
        axis |= {"tickmode": "array", "tickvals": list(values), "ticktext": [short(value) for value in values]}
    if len(values) == 1:
        axis["range"] = [values[0] - 1, values[0] + 1]
    return axis


def value_axis(title: str, **more: Json) -> dict[str, Json]:
    """An axis of measured values; `more` are plotly's own keys."""
    return {"title": {"text": title}, "automargin": True, **more}
