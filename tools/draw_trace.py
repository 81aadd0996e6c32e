"""Draw some batches of a Perfetto trace as SVG: ``python -m tools.draw_trace TRACE… --from BATCH --out FILE.svg``.

files of `--run.trace`, one per rank ──read_tracks──> Track per lane ──picture, cut to some batches──> SVG

The picture starts at the first action of a batch in a compute lane and ends where the batch behind the window starts.
Labels of micro-batch actions are those of `python -m bagpipe schedule`; waits are hatched.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.formats.drawing import LETTER_PX, QUIET, Drawing, fill_of
from bagpipe.schedule.formats.legend import LEGEND_ROW_PX, draw_axis, draw_legend, entries, stem
from bagpipe.schedule.formats.spans import Span
from bagpipe.schedule.ir.actions import Action, parse
from bagpipe.schedule.ir.ops import OPS

__all__ = ["Clock", "Mark", "Track", "picture", "read_tracks"]

_WIDTH_PX, _ROW_PX, _HEAD_PX = 1200, 22, 20
_LIGHT = "#bbb"
#: Name of the fill of waits.
_WAITS = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A span, and its action if it is one with an index."""

    span: Span
    action: Action | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One lane of one process, from the run's start to the end of training."""

    process: str
    lane: str
    marks: tuple[Mark, ...]

    @property
    def computes(self) -> bool:
        """Whether the lane runs forwards."""
        return any(mark.action is not None and mark.action.op == "F" for mark in self.marks)


def read_tracks(paths: Sequence[Path]) -> list[Track]:
    """Lanes of trace files, in the order of the files.

    Raises:
        InputError: a file cannot be read or is no trace.
    """
    return [track for path in paths for track in _tracks_of(path)]


def _tracks_of(path: Path) -> Iterator[Track]:
    process, lanes, marks = path.name, dict[int, str](), dict[int, list[Mark]]()
    try:
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            if event["name"] == "process_name":
                process = event["args"]["name"]
            elif event["name"] == "thread_name":
                lanes[event["tid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                marks.setdefault(event["tid"], []).append(_mark(event, lanes[event["tid"]]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected a trace file of --run.trace ({type(error).__name__}: {error})") from None
    # Training and evaluation each start by reading a batch 0.
    reads = sorted(mark.span.start_ns for found in marks.values() for mark in found if mark.span.name == "0X_READ0")
    end_ns = reads[1] if len(reads) > 1 else math.inf
    for row, lane in lanes.items():
        kept = tuple(mark for mark in marks.get(row, ()) if mark.span.start_ns < end_ns)
        yield Track(process=process, lane=lane, marks=kept)


def _mark(event: Mapping[str, Any], lane: str) -> Mark:
    start_ns, end_ns = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
    span = Span(lane=lane, name=event["name"], start_ns=start_ns, end_ns=end_ns, category=event["cat"])
    try:
        action = parse(span.name) if span.category != "wait" else None
    except ScheduleError:
        action = None
    return Mark(span=span, action=action if action is not None and action.index is not None else None)


class Clock:
    """Batch of every action, and start times of the batches.

    Args:
        tracks: of all ranks.

    Raises:
        InputError: the trace has no forward.
    """

    def __init__(self, tracks: Sequence[Track]) -> None:
        self._units = _units([mark.action for track in tracks for mark in track.marks if mark.action is not None])
        #: Process -> batch -> start, in the order of the batches.
        self.starts_ns: dict[str, dict[int, int]] = {}
        self._end_ns = 0
        for track in (track for track in tracks if track.computes):
            starts_ns = self.starts_ns.setdefault(track.process, {})
            for mark in track.marks:
                if mark.action is not None:
                    batch, start_ns = self.place(mark.action)[0], mark.span.start_ns
                    starts_ns[batch] = min(start_ns, starts_ns.get(batch, start_ns))
                    self._end_ns = max(self._end_ns, mark.span.end_ns)
        if not self.starts_ns:
            raise InputError("the trace has no forward of any batch")

    def place(self, action: Action) -> tuple[int, int]:
        """(batch, micro-batch within it) of an action with an index; micro-batch 0 for actions on whole batches."""
        index = action.index or 0
        return (index, 0) if OPS[action.op].unit == "batch" else divmod(index, self._units[_counting_stage(action)])

    def window_ns(self, first: int, batches: int) -> tuple[int, int]:
        """Start of batch `first`, and start of the batch behind the last one or the end of training.

        Raises:
            InputError: the trace lacks one of the batches.
        """
        known = sorted({batch for found in self.starts_ns.values() for batch in found})
        if batches < 1 or not known[0] <= first <= first + batches - 1 <= known[-1]:
            raise InputError(f"expected some of the batches {known[0]} to {known[-1]}, got {batches} from {first} on")
        starts = [min(f[b] for f in self.starts_ns.values() if b in f) for b in known if b in (first, first + batches)]
        return starts[0], starts[1] if len(starts) > 1 else self._end_ns


def _units(actions: Sequence[Action]) -> dict[int, int]:
    """Micro-batches per batch, by counting stage."""
    num_batches = 1 + max((action.index or 0 for action in actions if action.op == "X_READ"), default=0)
    counts: dict[int, int] = {}
    for action in (action for action in actions if OPS[action.op].unit == "micro"):
        stage = _counting_stage(action)
        counts[stage] = max(counts.get(stage, 0), 1 + (action.index or 0))
    return {stage: math.ceil(count / num_batches) for stage, count in counts.items()}


def _counting_stage(action: Action) -> int:
    """The stage whose micro-batches an action counts: for messages the sender."""
    received = OPS[action.op].role == "recv"
    return action.peer if received and action.peer is not None else action.stage


def picture(tracks: Sequence[Track], *, first: int, batches: int) -> str:
    """SVG of the training of `batches` batches from batch `first` on.

    Empty lanes are left out, and lanes equal to another rank's.

    Raises:
        InputError: the trace lacks one of the batches.
    """
    clock = Clock(tracks)
    window_ns = clock.window_ns(first, batches)
    shown = list(_distinct(_cut(tracks, window_ns)))
    processes = {process: [t for t in shown if t.process == process] for process in (t.process for t in shown)}
    lanes_px = _HEAD_PX * len(processes) + _ROW_PX * len(shown)
    actions = [mark.action for track in shown for mark in track.marks if mark.action is not None]
    legend = entries(actions, width_px=_WIDTH_PX, more=[(f"url(#{_WAITS})", "waiting")])
    drawing = Drawing(_WIDTH_PX, lanes_px + 36 + LEGEND_ROW_PX * (1 + legend[-1].row))
    page = _Page(drawing, clock, window_ns, margin_px=12 + LETTER_PX * max(len(track.lane) for track in shown))
    y = 0
    for process, own in processes.items():
        page.head(process, y, y + _HEAD_PX + _ROW_PX * len(own))
        for number, track in enumerate(own):
            page.lane(track, y + _HEAD_PX + _ROW_PX * number)
        y += _HEAD_PX + _ROW_PX * len(own)
    page.axis(y)
    draw_legend(drawing, legend, y + 32)
    return str(drawing)


def _cut(tracks: Iterable[Track], window_ns: tuple[int, int]) -> Iterator[Track]:
    begin_ns, end_ns = window_ns
    for track in tracks:
        marks = tuple(m for m in track.marks if m.span.end_ns > begin_ns and m.span.start_ns < end_ns)
        if marks:
            yield replace(track, marks=marks)


def _distinct(tracks: Iterable[Track]) -> Iterator[Track]:
    """Lanes without repetitions: every rank records the planning of the one cacher."""
    seen: set[tuple[Mark, ...]] = set()
    for track in tracks:
        if track.marks not in seen:
            seen.add(track.marks)
            yield track


class _Page:
    """Layout of the picture."""

    def __init__(self, drawing: Drawing, clock: Clock, window_ns: tuple[int, int], *, margin_px: int) -> None:
        self._drawing = drawing
        self._clock = clock
        self._begin_ns, self._end_ns = window_ns
        self._margin_px = margin_px
        self._px_per_ns = (_WIDTH_PX - margin_px - 10) / (self._end_ns - self._begin_ns)
        self._wait_fill = drawing.hatching(_WAITS, _LIGHT)

    def _x(self, time_ns: float) -> float:
        inside_ns = min(max(time_ns, self._begin_ns), self._end_ns)
        return self._margin_px + (inside_ns - self._begin_ns) * self._px_per_ns

    def head(self, process: str, top: float, bottom: float) -> None:
        """Name of a process, and start of its batches."""
        self._drawing.text(6, top + 14, process)
        for batch, start_ns in self._clock.starts_ns.get(process, {}).items():
            if self._begin_ns <= start_ns < self._end_ns:
                x = self._x(start_ns)
                self._drawing.line(x, top + 4, x, bottom, stroke=QUIET)
                self._drawing.text(x + 3, top + 14, f"batch {batch}", fill=QUIET)

    def lane(self, track: Track, y: float) -> None:
        self._drawing.text(6, y + 14, track.lane, fill=QUIET)
        for mark in sorted(track.marks, key=lambda mark: mark.span.category != "wait"):
            span, action = mark.span, mark.action
            begin_ms, end_ms = ((t - self._begin_ns) / 1e6 for t in (span.start_ns, span.end_ns))
            place = "" if action is None else f" (batch {self._clock.place(action)[0]})"
            x = self._x(span.start_ns)
            self._drawing.box(
                x,
                y + 1,
                max(0.5, self._x(span.end_ns) - x),
                _ROW_PX - 4,
                fill=self._wait_fill if action is None else fill_of(action),
                stroke=_LIGHT if action is None else "#555",
                title=f"{span.name}{place}: {begin_ms:.2f} to {end_ms:.2f} ms",
                labels=() if action is None else self._labels(action),
            )

    def _labels(self, action: Action) -> tuple[str, ...]:
        batch, unit = self._clock.place(action)
        if OPS[action.op].unit == "batch":
            return f"{stem(action.op)} {batch}", stem(action.op)
        return (replace(action, index=unit).text,)

    def axis(self, y: float) -> None:
        """Milliseconds."""
        total_ms = (self._end_ns - self._begin_ns) / 1e6
        draw_axis(self._drawing, self._margin_px, _WIDTH_PX - 10, y, length=total_ms, unit=" ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.draw_trace", description="Draw some batches of a trace.")
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="files of --run.trace, one per rank")
    parser.add_argument("--from", dest="first", type=int, required=True, metavar="BATCH", help="first batch to show")
    parser.add_argument("--batches", type=int, default=1, metavar="N", help="how many; default: 1")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    flags = parser.parse_args(argv)
    try:
        drawn = picture(read_tracks(flags.traces), first=flags.first, batches=flags.batches)
        flags.out.write_text(drawn, encoding="utf-8")
    except (InputError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
