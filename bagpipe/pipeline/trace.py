"""`Trace`: a bounded record of spans, written as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

    lanes ──note(lane, op, index, start, end)──> tuples in a list, no other work during the run
    other processes ──add(Span)──>                                        write(path) ──> names, microseconds, JSON

After the bound is reached, spans are only counted: the start of a run shows its pattern, and the file names the number
of dropped spans. Times are `time.monotonic_ns`, a clock common to all processes of a Linux machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from bagpipe.schedule.formats.spans import Span, trace_events, trace_json_lines

__all__ = ["Trace", "device_lane"]

_Note = tuple[str, str, int, int, int, str]


def device_lane(lane: str) -> str:
    """Name of the trace row with a lane's device times."""
    return f"{lane} (device)"


class Trace:
    """Collects spans; any thread may add.

    Args:
        capacity: spans kept; each takes about 250 bytes, so the default is bounded by a quarter of a gigabyte.
    """

    def __init__(self, capacity: int = 1_000_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._notes: list[_Note] = []
        self._dropped: list[int] = [0]

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def dropped(self) -> int:
        """Number of spans added after the trace was full."""
        return self._dropped[0]

    def note(self, lane: str, name: str, index: int, start_ns: int, end_ns: int, category: str = "action") -> None:
        """One span named ``name + index``; the text is made when the file is written. Index -1: the name alone."""
        # Two threads may both pass the test: the list then exceeds its bound by at most the number of lanes.
        if len(self._notes) < self.capacity:
            self._notes.append((lane, name, index, start_ns, end_ns, category))
        else:
            self._dropped[0] += 1

    def add(self, span: Span) -> None:
        """A span from elsewhere, such as the planner's, with its own lane name."""
        self.note(span.lane, span.name, -1, span.start_ns, span.end_ns, span.category)

    def spans(self) -> Iterator[Span]:
        """All spans kept, in the order they were noted."""
        for lane, name, index, start_ns, end_ns, category in list(self._notes):
            head, colon, peer = name.partition(":")  # 0SENDX_F:3 with index 1 is the action 0SENDX_F1:3
            text = f"{head}{index}{colon}{peer}" if index >= 0 else name
            yield Span(lane=lane, name=text, start_ns=start_ns, end_ns=end_ns, category=category)

    def _rows(self, lanes: Iterable[str]) -> Iterator[str]:
        """The lanes, each followed by its device's row where there is one."""
        noted = {note[0] for note in list(self._notes)}
        for lane in lanes:
            yield lane
            if device_lane(lane) in noted:
                yield device_lane(lane)

    def write(self, path: str | os.PathLike[str], *, process: str = "bagpipe", lanes: Iterable[str] = ()) -> None:
        """Write the trace file, whole or not at all.

        Args:
            path: the file; its folder must exist.
            process: name shown for the process; with spans dropped, their number is added.
            lanes: the order to show lanes in; what a device did for one is shown below it.
        """
        target = Path(path)
        partial = target.with_name(f"{target.name}.partial")
        name = f"{process} ({self.dropped} later spans not kept)" if self.dropped else process
        events = trace_events(self.spans(), process=name, process_id=os.getpid(), lanes=self._rows(lanes))
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(trace_json_lines(events))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
