"""`Span`: an interval of a lane, and its Chrome trace event for Perfetto and chrome://tracing.

simulation or runner ──Span, Span, …──> Chrome trace events, JSON
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Span", "trace_events", "trace_json_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval on a lane.

    Attributes:
        lane: name of its row.
        name: usually an action's text.
        start_ns, end_ns: on the machine's monotonic clock, which all processes of a machine share.
        category: ``action``, ``wait``, or a caller's own.
    """

    lane: str
    name: str
    start_ns: int
    end_ns: int
    category: str = "action"


def trace_events(
    spans: Iterable[Span], *, process: str = "bagpipe", process_id: int = 1, lanes: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Chrome trace events of a process: names, then a complete ("X") event per span with times in microseconds.

    Args:
        spans: in any order; times stay absolute, so traces of several processes can be joined.
        process, process_id: name and number of the process.
        lanes: display order of lanes; others follow in order of appearance.
    """
    yield {"ph": "M", "name": "process_name", "pid": process_id, "tid": 0, "args": {"name": process}}
    rows: dict[str, int] = {}

    def introduce(lane: str) -> Iterator[dict[str, Any]]:
        if lane not in rows:
            rows[lane] = row = len(rows) + 1
            yield {"ph": "M", "name": "thread_name", "pid": process_id, "tid": row, "args": {"name": lane}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": process_id, "tid": row, "args": {"sort_index": row}}

    for lane in lanes:
        yield from introduce(lane)
    for span in spans:
        yield from introduce(span.lane)
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.category,
            "pid": process_id,
            "tid": rows[span.lane],
            "ts": span.start_ns / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
        }


def trace_json_lines(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The trace file in pieces, one event per line, so a long trace is never one string in memory."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"
