"""`Drawing`: an SVG of boxes and texts, and the colours of schedules and traces.

render.svg (simulated), tools.draw_trace (measured) ──box, text, line──> Drawing ──str──> SVG without references
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS, Role

__all__ = ["LETTER_PX", "MESSAGE_FILLS", "OTHER_PIPE_FILLS", "QUIET", "Drawing", "fill_of"]

#: Fill by op: forwards blue, backwards green, updates purple, rows yellow to red, K-FAC teal to brown, others grey.
_FILLS: Mapping[str, str] = {
    "F": "#9ecae1",
    "REC": "#c6dbef",
    "B": "#a1d99b",
    "I": "#a1d99b",
    "W": "#c7e9c0",
    "OVERLAP_F_B": "#9fd2be",
    "OPT": "#9e9ac8",
    "REDUCE_GRAD": "#dadaeb",
    "COV_A": "#80cdc1",
    "COV_G": "#35978f",
    "REDUCE_COV": "#c7eae5",
    "X_INV": "#dfc27d",
    "PRECOND": "#bf812d",
    "X_BCAST": "#f6e8c3",
    "X_KL": "#e0d6bd",
    "X_MEASURE": "#dadaeb",
    "X_AGREE": "#bcbddc",
    "X_EMBED": "#fdd0a2",
    "X_EMBED_GRAD": "#fcbba1",
    "X_NORM": "#efedf5",
    "X_UPDATE": "#bcbddc",
    "X_UPDATE_LATE": "#dadaeb",
    "X_PREPULL": "#fee391",
    "X_PULL": "#fec44f",
    "X_PUSH": "#fec44f",
    "X_PUSH_LATE": "#fee391",
    "X_FETCH": "#fdd0a2",
    "X_INSERT": "#fdae6b",
    "X_EVICT": "#fcbba1",
    "X_WRITEBACK": "#fc9272",
}
#: Fill for pipes after the first, so the directions of a bidirectional schedule differ.
OTHER_PIPE_FILLS: Mapping[str, str] = {"F": "#fdae6b", "B": "#bc80bd", "I": "#bc80bd", "W": "#e5c6e6"}
#: Fill of messages, by role.
MESSAGE_FILLS: Mapping[Role, str] = {"send": "#e6550d", "recv": "#3182bd"}
_OTHER_FILL = "#d9d9d9"

#: Colour of axes and secondary text.
QUIET = "#777"

_FONT_PX = 11
#: Upper bound of a letter's width.
LETTER_PX = 7


def fill_of(action: Action) -> str:
    """Fill of the action's box."""
    message = MESSAGE_FILLS.get(OPS[action.op].role)
    pipes = {atom.pipe for atom in action.atoms}
    other = None if 0 in pipes else OTHER_PIPE_FILLS.get(action.op)
    return message or other or _FILLS.get(action.op, _OTHER_FILL)


class Drawing:
    """An SVG that parts are added to, in painting order; ``str(drawing)`` is the file.

    Args:
        width_px, height_px: size of the picture.
    """

    def __init__(self, width_px: int, height_px: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" '
            f'viewBox="0 0 {width_px} {height_px}" font-family="monospace" font-size="{_FONT_PX}">',
            '<rect width="100%" height="100%" fill="white"/>',
        ]

    def __str__(self) -> str:
        return "\n".join((*self._parts, "</svg>\n"))

    def hatching(self, name: str, colour: str) -> str:
        """Define a fill of thin diagonal lines; returns the `fill` for `box`."""
        self._parts.append(
            f'<pattern id="{name}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<line x1="0" y1="0" x2="0" y2="5" stroke="{colour}" stroke-width="1.5"/></pattern>'
        )
        return f"url(#{name})"

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = "black") -> None:
        """Add a text with its baseline at `y`; `anchor` (start, middle, end) is the part at `x`."""
        self._parts.append(
            f'<text x="{x:.2f}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(text, quote=False)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str) -> None:
        """Add a thin line."""
        self._parts.append(f'<line x1="{x1:.2f}" y1="{y1:g}" x2="{x2:.2f}" y2="{y2:g}" stroke="{stroke}"/>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        title: str = "",
        labels: Sequence[str] = (),
        stroke: str = "#555",
    ) -> None:
        """Add a rectangle in pixels, with a tooltip `title` and the first of `labels` that fits inside."""
        tooltip = f"<title>{escape(title, quote=False)}</title>" if title else ""
        label = next((label for label in labels if width > 3 + LETTER_PX * len(label)), "")
        shown = f'<text x="{x + 2:.2f}" y="{y + height / 2 + 4:g}">{escape(label, quote=False)}</text>' if label else ""
        self._parts.append(
            f'<g>{tooltip}<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="0.5"/>{shown}</g>'
        )
