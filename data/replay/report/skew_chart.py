"""Skew: the share of each table's accesses that its most used rows get."""

from __future__ import annotations

from data.replay.records import TableSkew
from data.replay.report.charts import Chart, Json, finite, plain, value_axis

__all__ = ["skew_chart"]

#: Cividis without its ends, dark to light: uniform for colour-blind readers, and visible on white and on black.
#: J. Nuñez, C. Anderton, R. Renslow, "Optimizing colormaps", PLoS ONE 13(7), 2018.
_SCALE = ((0x2F, 0x4F, 0x9E), (0x6C, 0x6E, 0x72), (0x9C, 0x93, 0x77), (0xD9, 0xB4, 0x3C))


def skew_chart(skew: tuple[TableSkew, ...]) -> Chart:
    """Coverage curves, one per table, coloured by the table's size rank."""
    ordered = sorted(skew, key=lambda table: (-table.rows, table.table))
    traces: list[Json] = []
    for number, table in enumerate(ordered):
        color = _color(1 - number / max(len(ordered) - 1, 1))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(table.curve) > 1 else "markers",
                "name": plain(table.table),
                "x": [finite(x) for x, _ in table.curve],
                "y": [finite(y) for _, y in table.curve],
                "line": {"color": color, "width": 1.5},
                "hovertemplate": f"<b>%{{fullData.name}}</b> · {table.rows:,} rows, {table.accesses:,} accesses<br>"
                "%{x:.3~%} of the rows get %{y:.1%} of the accesses<extra></extra>",
            }
        )
    layout: dict[str, Json] = {
        "xaxis": value_axis(
            "share of the table's rows, most used first", type="log", tickformat="~%", dtick=1, exponentformat="none"
        ),
        "yaxis": value_axis("share of the table's accesses", tickformat="~%", range=[0, 1.02]),
        "hovermode": "closest",
    }
    return Chart(
        name="skew",
        title="Skew, table by table",
        note="A curve that rises at the left is a table whose few hot rows get most accesses: a small cache serves it. "
        "Yellow curves are large tables, blue ones small. Point at a curve to name it; click names to hide tables.",
        figures={(): {"data": traces, "layout": layout}},
    )


def _color(fraction: float) -> str:
    """The colour at `fraction` in [0, 1] on the scale, piecewise linear."""
    position = min(max(fraction, 0.0), 1.0) * (len(_SCALE) - 1)
    low = min(int(position), len(_SCALE) - 2)
    part = position - low
    mixed = [round(a + (b - a) * part) for a, b in zip(_SCALE[low], _SCALE[low + 1], strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)
