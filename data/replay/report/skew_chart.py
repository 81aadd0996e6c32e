"""Skew: the share of each table's accesses that its most used rows get.

The largest tables, which decide how large a cache must be, have a look each; the others are one grey group of the
legend. The page's script lifts the curve that the pointer is on.
"""

from __future__ import annotations

from bagpipe.report.charts import Chart, Json, finite, plain, value_axis
from data.replay.records import TableSkew

__all__ = ["skew_chart"]

#: Looks of the largest tables, the largest first: Okabe and Ito's palette for colour-blind readers, in two dashes.
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("solid", "dash")
_OTHERS = "#9a9a9a"
#: Tables with a look of their own.
_NAMED = len(_COLORS) * len(_DASHES) - 4


def skew_chart(skew: tuple[TableSkew, ...]) -> Chart:
    """Coverage curves, one per table."""
    ordered = sorted(skew, key=lambda table: (-table.rows, table.table))
    rest = len(ordered) - _NAMED if len(ordered) > _NAMED + 1 else 0
    traces: list[Json] = []
    for number, table in enumerate(ordered):
        is_named = number < len(ordered) - rest
        look: dict[str, Json] = {
            "name": plain(table.table),
            "zorder": 1,
            "line": {
                "color": _COLORS[number % len(_COLORS)],
                "width": 2,
                "dash": _DASHES[number // len(_COLORS) % len(_DASHES)],
            },
        }
        others: dict[str, Json] = {
            "name": f"{rest} smaller tables",
            "legendgroup": "others",
            "showlegend": number == len(ordered) - rest,
            "line": {"color": _OTHERS, "width": 1},
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(table.curve) > 1 else "markers",
                "meta": plain(table.table),
                "x": [finite(x) for x, _ in table.curve],
                "y": [finite(y) for _, y in table.curve],
                "hovertemplate": f"<b>%{{fullData.meta}}</b> · {table.rows:,} rows, {table.accesses:,} accesses<br>"
                "%{x:.3~%} of the rows get %{y:.1%} of the accesses<extra></extra>",
                **(look if is_named else others),
            }
        )
    layout: dict[str, Json] = {
        "xaxis": value_axis(
            "share of the table's rows, most used first", type="log", tickformat="~%", dtick=1, exponentformat="none"
        ),
        "yaxis": value_axis("share of the table's accesses", tickformat="~%", range=[0, 1.02]),
        "hovermode": "closest",
        "meta": "lift",
    }
    return Chart(
        name="skew",
        title="Skew, table by table",
        note="A curve that rises at the left is a table whose few hot rows get most accesses: a small cache serves it. "
        "The largest tables have colours, the others are grey. Point at a curve to name it and lift it out; click a "
        "name to hide it, double-click to see it alone.",
        figures={(): {"data": traces, "layout": layout}},
    )
