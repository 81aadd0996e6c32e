"""Legend, time axis and short labels of a drawing of actions.

actions ──entries──> Entry: one colour with the operations that have it, in rows of the drawing's width ──draw_legend
length of time ──ticks──> multiples of 1, 2 or 5 times a power of ten ──draw_axis
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagpipe.schedule.formats.drawing import LETTER_PX, OTHER_PIPE_FILLS, QUIET, Drawing, fill_of
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS

__all__ = ["LEGEND_ROW_PX", "Entry", "draw_axis", "draw_legend", "entries", "short_labels", "stem", "ticks"]

LEGEND_ROW_PX = 18
_LEFT_PX = 12.0
_BOX_PX = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One colour of a legend.

    Attributes:
        row, x: position; x in pixels.
        fill: the colour. text: shown beside it. meaning: tooltip.
    """

    row: int
    x: float
    fill: str
    text: str
    meaning: str = ""


def stem(op: str) -> str:
    """``X_FETCH`` -> ``FETCH``: the operation's name without the mark of an extension."""
    return op.removeprefix("X_")


def short_labels(action: Action) -> tuple[str, ...]:
    """Labels of an action, the longest first: ``0X_FETCH3``, ``FETCH3``, ``FETCH``, ``3``.

    The last one is the number of its batch or micro-batch, for boxes whose colour tells the operation.
    """
    if len(action.atoms) > 1 or action.index is None:
        return (action.text,)
    name = stem(action.op)
    return tuple(dict.fromkeys((action.text, f"{name}{action.index}", name, str(action.index))))


def entries(actions: Iterable[Action], *, width_px: float, more: Sequence[tuple[str, str]] = ()) -> list[Entry]:
    """The legend of the actions.

    Args:
        actions: of the drawing.
        width_px: of the drawing; longer legends have more rows.
        more: further (fill, text).
    """
    fills: dict[str, dict[str, list[str]]] = {}
    ops = {(action.op, fill_of(action)) for action in actions}
    for op, fill in sorted(ops, key=lambda item: (list(OPS).index(item[0]), item[1])):
        role = OPS[op].role
        name = (
            role
            if role in ("send", "recv")
            else stem(op) + (" of other pipes" if OTHER_PIPE_FILLS.get(op) == fill else "")
        )
        fills.setdefault(fill, {}).setdefault(name, []).append(f"{op}: {OPS[op].meaning}")
    texts = [(fill, ", ".join(names), "\n".join(itertools.chain(*names.values()))) for fill, names in fills.items()]
    found: list[Entry] = []
    row, x = 0, _LEFT_PX
    for fill, text, meaning in (*texts, *((fill, text, "") for fill, text in more)):
        entry_px = 2 * _BOX_PX + LETTER_PX * len(text)
        if x > _LEFT_PX and x + entry_px > width_px:
            row, x = row + 1, _LEFT_PX
        found.append(Entry(row=row, x=x, fill=fill, text=text, meaning=meaning))
        x += entry_px
    return found


def draw_legend(drawing: Drawing, legend: Sequence[Entry], y: float) -> None:
    """Draw the legend from `y` down."""
    for entry in legend:
        top = y + LEGEND_ROW_PX * entry.row
        drawing.box(entry.x, top, _BOX_PX, 12, fill=entry.fill, title=entry.meaning)
        drawing.text(entry.x + _BOX_PX + 5, top + 10, entry.text)


def ticks(length: float, width_px: float, tick_px: float) -> list[float]:
    """Round times from 0 to `length`, at least `tick_px` apart on `width_px`; [0] if `length` is 0."""
    if length <= 0:
        return [0.0]
    least = length * min(1.0, tick_px / max(width_px, 1.0))
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    return [number * step for number in range(int(length / step * (1 + 1e-9)) + 1)]


def draw_axis(drawing: Drawing, left: float, right: float, y: float, *, length: float, unit: str = "") -> None:
    """Draw a time axis of 0 to `length` from `left` to `right` pixels, 23 pixels high; `unit` follows each number."""
    longest = LETTER_PX * (len(f"{length:g}{unit}") + 3)
    drawing.line(left, y + 4, right, y + 4, stroke=QUIET)
    for time in ticks(length, right - left, longest):
        x = left + (time / length * (right - left) if length else 0.0)
        drawing.line(x, y + 4, x, y + 8, stroke=QUIET)
        drawing.text(x, y + 19, f"{time:g}{unit}", anchor="middle", fill=QUIET)
