from __future__ import annotations

import json

from bagpipe.schedule.formats.spans import Span, trace_events, trace_json_lines


def test_lanes_come_in_the_order_asked_for_and_times_in_microseconds() -> None:
    spans = [Span(lane="b", name="x", start_ns=1_500, end_ns=2_000, category="wait")]
    events = list(trace_events(spans, process="p", process_id=7, lanes=("a",)))
    assert [e["args"] for e in events if e["ph"] == "M"] == [
        {"name": "p"}, {"name": "a"}, {"sort_index": 1}, {"name": "b"}, {"sort_index": 2}
    ]  # fmt: skip
    assert events[-1] == {"ph": "X", "name": "x", "cat": "wait", "pid": 7, "tid": 2, "ts": 1.5, "dur": 0.5}


def test_the_file_is_json_however_many_events() -> None:
    for count in range(3):
        text = "".join(trace_json_lines({"n": n} for n in range(count)))
        assert json.loads(text)["traceEvents"] == [{"n": n} for n in range(count)]
