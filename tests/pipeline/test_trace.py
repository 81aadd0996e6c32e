from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.formats.spans import Span


def test_a_trace_file_names_lanes_and_holds_spans(tmp_path: Path) -> None:
    trace = Trace()
    trace.note("compute", "0F", 3, 2_000, 5_000)
    trace.add(Span(lane="oracle", name="plan 3", start_ns=1_000, end_ns=1_500, category="plan"))
    trace.write(tmp_path / "trace.json", process="rank 0", lanes=("data", "compute"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert events[0]["args"] == {"name": "rank 0"}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["data", "compute", "oracle"]
    spans = [{key: e[key] for key in ("name", "cat", "tid", "ts", "dur")} for e in events if e["ph"] == "X"]
    assert spans == [
        {"name": "0F3", "cat": "action", "tid": 2, "ts": 2.0, "dur": 3.0},
        {"name": "plan 3", "cat": "plan", "tid": 3, "ts": 1.0, "dur": 0.5},
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]


def test_device_spans_are_shown_below_their_lane(tmp_path: Path) -> None:
    trace = Trace()
    for lane in ("compute", "compute (device)", "net-out"):
        trace.note(lane, "0F", 0, 1, 2)
    trace.write(tmp_path / "trace.json", lanes=("copy", "compute", "net-out"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["copy", "compute", "compute (device)", "net-out"]


def test_a_full_trace_counts_what_it_drops(tmp_path: Path) -> None:
    trace = Trace(capacity=2)
    for index in range(5):
        trace.note("a", "0F", index, index, index + 1)
    assert (len(trace), trace.dropped) == (2, 3)
    trace.write(tmp_path / "trace.json")
    assert "3 later spans not kept" in (tmp_path / "trace.json").read_text(encoding="utf-8")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    trace = Trace()
    trace.note("a", "0F", 0, 0, 1)
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match=r"trace\.json"):
        trace.write(tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_capacity_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Trace(0)
