"""The picture of a trace: batches of actions, the window, and drawn elements."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.formats import render
from bagpipe.schedule.formats.spans import Span, trace_events, trace_json_lines
from bagpipe.schedule.ir.actions import parse
from tools.draw_trace import Clock, main, picture, read_tracks

MS = 1_000_000


def written(path: Path, spans: Sequence[Span], process: str, lanes: Sequence[str] = ()) -> Path:
    path.write_text("".join(trace_json_lines(trace_events(spans, process=process, lanes=lanes))), encoding="utf-8")
    return path


def span(lane: str, name: str, start_ms: float, end_ms: float, category: str = "action") -> Span:
    return Span(lane=lane, name=name, start_ns=round(start_ms * MS), end_ns=round(end_ms * MS), category=category)


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[Path]:
    """Two micro-batches per batch at rank 0, one at rank 1; three batches of training, then evaluation."""
    first = [
        *(span("oracle", f"0X_PLAN{b}", 8 * b, 8 * b + 4) for b in range(3)),
        *(span("data", f"0X_READ{b}", 10 * b, 10 * b + 1) for b in range(3)),
        *(span("compute0", f"0F{m}", 5 * m + 1, 5 * m + 3) for m in range(6)),
        *(span("compute0", f"0SENDX_F{m}:1", 5 * m + 3, 5 * m + 4) for m in range(6)),
        *(span("compute0", f"wait 0X_INSERT #{m}", 5 * m + 4, 5 * m + 6, "wait") for m in range(6)),
        span("net-out", "0X_WRITEBACK0", 25, 26),
        span("data", "0X_READ0", 40, 41),
        span("compute", "0F0", 41, 45),
    ]
    second = [
        *(span("oracle", f"0X_PLAN{b}", 8 * b, 8 * b + 4) for b in range(3)),
        *(span("data", f"0X_READ{b}", 10 * b, 10 * b + 1) for b in range(3)),
        *(span("compute1", f"1RECVX_F{m}:0", 5 * m + 3, 5 * m + 4) for m in range(6)),
        *(span("compute1", f"1F{b}", 10 * b + 9, 10 * b + 11) for b in range(3)),
    ]
    return [
        written(tmp_path / "a.json", first, "rank 0", ("oracle", "data", "compute0", "net-out")),
        written(tmp_path / "b.json", second, "rank 1"),
    ]


def boxes(drawing: str) -> dict[str, ElementTree.Element]:
    """Tooltip without times -> box."""
    found = {}
    for group in ElementTree.fromstring(drawing).iter():
        title = group.find("{*}title")
        if group.tag.endswith("}g") and title is not None:
            found[(title.text or "").partition(": ")[0]] = group
    return found


def texts(drawing: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing).iter() if element.tag.endswith("}text")]


def test_actions_belong_to_batches(two_ranks: list[Path]) -> None:
    clock = Clock(read_tracks(two_ranks))
    assert clock.place(parse("0X_READ2")) == (2, 0)
    assert clock.place(parse("0F3")) == (1, 1)
    assert clock.place(parse("1F2")) == (2, 0)
    assert clock.place(parse("1RECVX_F3:0")) == (1, 1), "messages count the sender's micro-batches"
    assert clock.starts_ns == {
        "rank 0": {0: 1 * MS, 1: 11 * MS, 2: 21 * MS},
        "rank 1": {0: 3 * MS, 1: 13 * MS, 2: 23 * MS},
    }


def test_the_window(two_ranks: list[Path]) -> None:
    clock = Clock(read_tracks(two_ranks))
    assert clock.window_ns(1, 1) == (11 * MS, 21 * MS)
    assert clock.window_ns(0, 2) == (1 * MS, 21 * MS)
    assert clock.window_ns(2, 1) == (21 * MS, 31 * MS), "evaluation is not shown"


def test_drawn_elements(two_ranks: list[Path]) -> None:
    drawing = picture(read_tracks(two_ranks), first=1, batches=1)
    shown = texts(drawing)
    assert shown.count("rank 0") == shown.count("rank 1") == 1
    assert shown.count("oracle") == 1, "what every rank notes of the one cacher is drawn once"
    assert "net-out" not in shown, "nothing happened there"
    assert {"0F0", "0F1", "1F0", "PLAN 1", "READ 2", "batch 1", "0 ms", "10 ms", "F", "send", "recv", "waiting"} <= set(
        shown
    )
    assert "batch 2" not in shown
    found = boxes(drawing)
    assert {"0F2 (batch 1)", "0F3 (batch 1)", "1F1 (batch 1)", "wait 0X_INSERT #2"} <= set(found)
    assert not {"0F1 (batch 0)", "0F4 (batch 2)"} & set(found)
    wait, forward = found["wait 0X_INSERT #2"].find("{*}rect"), found["0F2 (batch 1)"].find("{*}rect")
    assert wait is not None
    assert forward is not None
    assert wait.get("fill") == "url(#wait)"
    assert forward.get("fill") == "#9ecae1"
    assert float(forward.get("width", "0")) == pytest.approx(float(wait.get("width", "0")), abs=0.02)
    assert "href" not in drawing


def test_boxes_end_at_the_window(two_ranks: list[Path]) -> None:
    for group in boxes(picture(read_tracks(two_ranks), first=1, batches=1)).values():
        box = group.find("{*}rect")
        assert box is not None
        assert 0 < float(box.get("x", "0")) < float(box.get("x", "0")) + float(box.get("width", "0")) <= 1190.51


def test_a_trace_of_the_prefetch_pipeline(tmp_path: Path) -> None:
    """Training and concurrent prefetching."""
    program = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=1, microbatches=2).unroll(6)
    trace = Trace()
    for found in render.spans(simulate(program)):
        trace.add(found)
    trace.write(tmp_path / "trace.json", process="rank 0", lanes=program.lanes)
    out = tmp_path / "step.svg"
    assert main([str(tmp_path / "trace.json"), "--from", "1", "--batches", "2", "--out", str(out)]) == 0
    found = boxes(out.read_text(encoding="utf-8"))
    assert {"0F2 (batch 1)", "0F3 (batch 1)", "0B2 (batch 1)", "0F5 (batch 2)", "0X_UPDATE2 (batch 2)"} <= set(found)
    assert {"0X_READ5 (batch 5)", "0X_FETCH5 (batch 5)", "0X_INSERT5 (batch 5)", "0X_WRITEBACK5 (batch 5)"} <= set(
        found
    )


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, "--from 0", "No such file"),
        ("{", "--from 0", "expected a trace file of --run.trace (JSONDecodeError"),
        ("[]", "--from 0", "expected a trace file of --run.trace"),
        ('{"traceEvents": [{"ph": "X", "name": "0F0", "tid": 1}]}', "--from 0", "expected a trace file of --run.trace"),
        ('{"traceEvents": []}', "--from 0", "the trace has no forward of any batch"),
        ("", "--from 3", "expected some of the batches 0 to 2, got 1 from 3 on"),
        ("", "--from 1 --batches 3", "expected some of the batches 0 to 2, got 3 from 1 on"),
        ("", "--from 1 --batches 0", "got 0 from 1 on"),
    ],
)
def test_bad_input_is_one_line(
    content: str | None,
    arguments: str,
    message: str,
    two_ranks: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.json"
    if content:
        path.write_text(content, encoding="utf-8")
    traces = [str(trace) for trace in two_ranks] if content == "" else [str(path)]
    assert main([*traces, *arguments.split(), "--out", str(tmp_path / "out.svg")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.svg").exists()
