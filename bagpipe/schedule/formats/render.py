"""Renderers of schedules. Program -> CSV; Simulation -> grid, SVG, JSON, Perfetto trace.

The CSV is PyTorch's: one row per lane, one action per cell. A program with actions that PyTorch cannot read has a first
row ``#resource=…`` with the lane names, which PyTorch rejects.
"""

from __future__ import annotations

import csv as csv_format
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

from bagpipe.schedule.analysis.simulate import Simulation
from bagpipe.schedule.formats.drawing import MESSAGE_FILLS, Drawing, fill_of
from bagpipe.schedule.formats.legend import LEGEND_ROW_PX, draw_axis, draw_legend, entries, short_labels
from bagpipe.schedule.formats.spans import Span, trace_events, trace_json_lines
from bagpipe.schedule.ir.actions import Action, torch_reads
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program

__all__ = ["csv", "grid", "perfetto", "spans", "summary", "svg"]

_HEADER = "#resource="


def csv(program: Program) -> str:
    """The program's lanes as CSV; see the module's docstring for the header row."""
    out = io.StringIO()
    writer = csv_format.writer(out, lineterminator="\n")
    if not all(torch_reads(action) for actions in program.lanes.values() for action in actions):
        first, *others = program.lanes
        writer.writerow([_HEADER + first, *others])
    for actions in program.lanes.values():
        writer.writerow([action.text for action in actions])
    return out.getvalue()


#: Columns above which a grid is drawn coarser, with texts cut, instead of wider.
_GRID_COLUMNS = 400
#: Hard limit of columns; the shortest actions can then be invisible.
_MOST_COLUMNS = 20_000


def grid(simulation: Simulation) -> str:
    """Lanes as lines, time to the right. ``|`` begins an action, ``-`` fills it, ``.`` is idle.

    Every action has as many columns as its text needs, or fewer if the grid would be too wide. Of a program with rows a
    last line tells the exposed time.
    """
    durations = [t.finish - t.start for t in simulation.timed if t.finish > t.start]
    if not durations:
        return "\n".join(simulation.lanes) + "\n"
    shortest = min(durations)
    units = simulation.makespan / shortest
    timed_texts = [(1 + len(t.action.text), t.finish - t.start) for t in simulation.timed if t.finish > t.start]
    wanted = math.ceil(max(letters * shortest / duration for letters, duration in timed_texts))
    columns = min(max(1, min(wanted, int(_GRID_COLUMNS / units))) / shortest, _MOST_COLUMNS / simulation.makespan)
    width = round(simulation.makespan * columns)  # columns are per unit of cost
    lines = {lane: ["."] * width for lane in simulation.lanes}
    for timed in simulation.timed:
        first, last = round(timed.start * columns), round(timed.finish * columns)
        if last > first:
            lines[timed.lane][first:last] = ("|" + timed.action.text.ljust(last - first, "-"))[: last - first]
    margin = max(len(lane) for lane in lines)
    drawn = "".join(f"{lane.ljust(margin)} {''.join(cells)}|\n" for lane, cells in lines.items())
    return drawn + (f"{_exposed(simulation)}\n" if _has_rows(simulation) else "")


def _has_rows(simulation: Simulation) -> bool:
    return any(timed.action.op == "X_INSERT" for timed in simulation.timed)


def _exposed(simulation: Simulation) -> str:
    share = simulation.exposed / simulation.makespan if simulation.makespan else 0
    return f"exposed {simulation.exposed:g} ({share:.1%}): computation waits for rows"


def summary(simulation: Simulation) -> dict[str, Any]:
    """The simulation as plain JSON values; times in the unit of the costs."""
    return {
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "exposed": simulation.exposed,
        "peak_in_flight": [use.peak_in_flight for use in simulation.lanes.values()],
        "own_span_idle": [use.span_idle for use in simulation.lanes.values()],
        "lanes": {
            lane: {
                "busy": use.busy,
                "idle": use.idle,
                "span_idle": use.span_idle,
                "waits": dict(use.waits),
                "exposed": use.exposed,
                "peak_in_flight": use.peak_in_flight,
                "peak_bytes": use.peak_bytes,
            }
            for lane, use in simulation.lanes.items()
        },
        "occupancy": dict(simulation.occupancy),
        "critical_path": [timed.action.text for timed in simulation.critical_path],
        "actions": [
            {"lane": t.lane, "action": t.action.text, "start": t.start, "finish": t.finish} for t in simulation.timed
        ],
    }


#: Width of a visible action of duration 0.
_TICK_PX = 1.5
#: Heights of the axis and of the line below the legend.
_AXIS_PX, _FOOT_PX = 30, 20


def svg(simulation: Simulation, *, width_px: int = 1200, row_px: int = 28) -> str:
    """A self-contained SVG: one row per lane, one box per action, a time axis in units of cost, and a legend.

    A box shows its action's text, or as much of it as fits: operation and number, or the number alone. Its tooltip
    has the text, the time and the meaning. A SEND or RECV of duration 0 is a tick; other actions of duration 0 are
    left out.
    """
    margin_px = 12 + 8 * max((len(lane) for lane in simulation.lanes), default=0)
    right_px = max(width_px - 10, margin_px + 1)
    scale = (right_px - margin_px) / simulation.makespan if simulation.makespan else 0
    drawn = [t for t in simulation.timed if t.finish > t.start or OPS[t.action.op].role in MESSAGE_FILLS]
    legend = entries((timed.action for timed in drawn), width_px=width_px)
    lanes_px = row_px * len(simulation.lanes) + 5
    foot_px = lanes_px + _AXIS_PX + (LEGEND_ROW_PX * (1 + legend[-1].row) if legend else 0)
    drawing = Drawing(width_px, foot_px + _FOOT_PX)
    top = {lane: 5 + row_px * number for number, lane in enumerate(simulation.lanes)}
    for lane, y in top.items():
        drawing.text(6, y + row_px / 2 + 2, lane)
    for timed in drawn:
        drawing.box(
            margin_px + timed.start * scale,
            top[timed.lane],
            (timed.finish - timed.start) * scale or _TICK_PX,
            row_px - 4,
            fill=fill_of(timed.action),
            title=f"{timed.action.text}: {timed.start:g} to {timed.finish:g}\n{OPS[timed.action.op].meaning}",
            labels=short_labels(timed.action),
        )
    draw_axis(drawing, margin_px, right_px, lanes_px, length=simulation.makespan)
    draw_legend(drawing, legend, lanes_px + _AXIS_PX)
    foot = f"makespan {simulation.makespan:g} units of cost, bubble {simulation.bubble:.1%}"
    drawing.text(12, foot_px + 12, foot + (f", {_exposed(simulation)}" if _has_rows(simulation) else ""))
    return str(drawing)


def spans(simulation: Simulation, *, unit_ns: int = 1_000_000) -> list[Span]:
    """The simulation as trace spans; a unit of cost is `unit_ns` long."""
    return [
        Span(
            lane=t.lane,
            name=t.action.text,
            start_ns=round(t.start * unit_ns),
            end_ns=round(t.finish * unit_ns),
            category=_category(t.action),
        )
        for t in simulation.timed
    ]


def _category(action: Action) -> str:
    """``action``, ``send`` or ``recv``, plus the pipe if it is not the first; trace viewers filter by it."""
    role = OPS[action.op].role
    pipes = sorted({atom.pipe for atom in action.atoms} - {0})
    return ",".join([role if role in MESSAGE_FILLS else "action", *(f"pipe{pipe}" for pipe in pipes)])


def perfetto(simulation: Simulation) -> str:
    """The simulation as a Perfetto trace; a unit of cost is a millisecond."""
    events = trace_events(spans(simulation), process="simulated", lanes=simulation.lanes)
    return "".join(trace_json_lines(events))


#: Format name of the command line -> renderer.
RENDERERS: Mapping[str, Callable[[Simulation], str]] = {"grid": grid, "svg": svg, "perfetto": perfetto}
