"""Pictures of a timeline: text with a column for the shortest forward, SVG, Perfetto trace.

    rank 0      AaaBbbAaBb.Aaa         capitals: forward; small letters: backward; one letter for each job
    exchange A  ...=....=.....

A picture begins at the first arrival and ends where the shortest forward would be too narrow to see; `shown_s` says
when. A trace has everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_uppercase

from bagpipe.jigsaw.timeline import Timeline
from bagpipe.schedule.formats.drawing import Drawing
from bagpipe.schedule.formats.legend import LEGEND_ROW_PX, draw_axis, draw_legend, entries
from bagpipe.schedule.formats.spans import Span, trace_events, trace_json_lines

__all__ = ["fills_of", "grid", "lanes_of", "letter_of", "perfetto", "shown_s", "svg"]

#: (forward, backward) of a job; the ninth begins anew. Dark and light of C. Brewer's qualitative pairs.
_FILLS = (
    ("#6baed6", "#c6dbef"),
    ("#fd8d3c", "#fdd0a2"),
    ("#74c476", "#c7e9c0"),
    ("#9e9ac8", "#dadaeb"),
    ("#fb6a4a", "#fcbba1"),
    ("#e7ba52", "#f3e2b3"),
    ("#ce6dbd", "#ecc9e6"),
    ("#969696", "#d9d9d9"),
)
#: Width of the shortest forward in an SVG.
_LEAST_PX = 4
_ROW_PX = 28


def letter_of(number: int) -> str:
    """The name of a job in pictures: A to Z, then A1 to Z1, and so on. Text has room for the capital only."""
    turn, place = divmod(number, len(ascii_uppercase))
    return f"{ascii_uppercase[place]}{turn or ''}"


def fills_of(number: int) -> tuple[str, str]:
    """Colours of a job's forward and backward."""
    return _FILLS[number % len(_FILLS)]


def shown_s(timeline: Timeline, cells: float) -> float:
    """Seconds from the first arrival that a picture shows in which the shortest forward is one of so many cells."""
    shortest_s = min(job.forward_s for job in timeline.jobs)
    return min(timeline.last_s - timeline.first_s, cells * shortest_s)


def grid(timeline: Timeline, *, columns: int = 110) -> str:
    """Ranks and exchanges as lines of text, time to the right."""
    column_s = min(job.forward_s for job in timeline.jobs)
    shown = shown_s(timeline, columns)
    width = round(shown / column_s)
    names = lanes_of(timeline)
    lines = {name: ["."] * width for name in names}

    def fill(name: str, start_s: float, finish_s: float, sign: str) -> None:
        first, last = (min(width, round((each - timeline.first_s) / column_s)) for each in (start_s, finish_s))
        lines[name][first:last] = sign * (last - first)

    for piece in timeline.pieces:
        letter = letter_of(piece.job)[0]
        fill(f"rank {piece.rank}", piece.start_s, piece.forward_end_s, letter)
        fill(f"rank {piece.rank}", piece.forward_end_s, piece.finish_s, letter.lower())
    for exchange in timeline.exchanges:
        fill(f"exchange {letter_of(exchange.job)}", exchange.start_s, exchange.finish_s, "=")
    margin = max(map(len, names)) + 2
    drawn = "".join(f"{name.ljust(margin)}{''.join(cells)}\n" for name, cells in lines.items())
    jobs = ", ".join(f"{letter_of(number)} {job.name}" for number, job in enumerate(timeline.jobs))
    return f"{drawn}{jobs}; capital: forward, small: backward; a column is {column_s:g} s{_cut(timeline, shown)}\n"


def svg(timeline: Timeline, *, width_px: int = 1200) -> str:
    """A self-contained SVG: a row for each rank and one for the exchanges of each job, a time axis and a legend."""
    names = lanes_of(timeline)
    margin_px = 12 + 8 * max(map(len, names))
    right_px = max(width_px - 10, margin_px + 1)
    shown = shown_s(timeline, (right_px - margin_px) / _LEAST_PX)
    scale = (right_px - margin_px) / shown
    texts = [
        (fill, f"{letter_of(number)} {what} {job.name}")
        for number, job in enumerate(timeline.jobs)
        for fill, what in zip(fills_of(number), ("forward", "backward"), strict=True)
    ]
    legend = entries((), width_px=width_px, more=texts)
    lanes_px = _ROW_PX * len(names) + 5
    foot_px = lanes_px + 30 + LEGEND_ROW_PX * (1 + legend[-1].row)
    drawing = Drawing(width_px, foot_px + 20)
    for row, name in enumerate(names):
        drawing.text(6, _ROW_PX * row + 21, name)
    for row, start_s, finish_s, fill, title, label in _boxes(timeline):
        start, finish = (min(shown, each - timeline.first_s) for each in (start_s, finish_s))
        if finish > start:
            width = (finish - start) * scale
            drawing.box(
                margin_px + start * scale, _ROW_PX * row + 5, width, _ROW_PX - 4, fill=fill, title=title, labels=[label]
            )
    draw_axis(drawing, margin_px, right_px, lanes_px, length=shown, unit=" s")
    draw_legend(drawing, legend, lanes_px + 30)
    drawing.text(12, foot_px + 12, f"{timeline.label}{_cut(timeline, shown)}")
    return str(drawing)


def _boxes(timeline: Timeline) -> Iterator[tuple[int, float, float, str, str, str]]:
    """Row, start, finish, fill, tooltip and label of each box."""
    for piece in timeline.pieces:
        name = f"{timeline.jobs[piece.job].name}, iteration {piece.iteration}, worker {piece.worker}"
        fills, letter = fills_of(piece.job), letter_of(piece.job)
        label = f"{letter}{piece.iteration}"
        yield piece.rank, piece.start_s, piece.forward_end_s, fills[0], f"{name}: forward", label
        title = f"{name}: backward of the last {piece.share:.4g} of the layers"
        yield piece.rank, piece.forward_end_s, piece.finish_s, fills[1], title, ""
    for exchange in timeline.exchanges:
        name = f"{timeline.jobs[exchange.job].name}, iteration {exchange.iteration}: exchange"
        row = timeline.ranks + exchange.job
        yield row, exchange.start_s, exchange.finish_s, fills_of(exchange.job)[0], name, f"{exchange.iteration}"


def _cut(timeline: Timeline, shown: float) -> str:
    whole = timeline.last_s - timeline.first_s
    return f"; the first {shown:g} s of {whole:g}" if shown < whole else ""


def perfetto(timeline: Timeline) -> str:
    """All of it as a Perfetto trace."""
    events = trace_events(_spans(timeline), process=timeline.label, lanes=lanes_of(timeline))
    return "".join(trace_json_lines(events))


def _spans(timeline: Timeline) -> Iterator[Span]:
    for piece in timeline.pieces:
        letter, lane = letter_of(piece.job), f"rank {piece.rank}"
        yield _span(lane, f"{letter} F{piece.iteration}", piece.start_s, piece.forward_end_s)
        yield _span(lane, f"{letter} B{piece.iteration}", piece.forward_end_s, piece.finish_s)
    for exchange in timeline.exchanges:
        letter = letter_of(exchange.job)
        yield _span(f"exchange {letter}", f"{letter} {exchange.iteration}", exchange.start_s, exchange.finish_s)


def _span(lane: str, name: str, start_s: float, end_s: float) -> Span:
    return Span(lane=lane, name=name, start_ns=round(start_s * 1e9), end_ns=round(end_s * 1e9))


def lanes_of(timeline: Timeline) -> list[str]:
    """Names of the rows: ranks, then exchanges."""
    jobs = [f"exchange {letter_of(number)}" for number in range(len(timeline.jobs))]
    return [*(f"rank {rank}" for rank in range(timeline.ranks)), *jobs]
