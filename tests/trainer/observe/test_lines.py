from __future__ import annotations

import io
import json
from datetime import datetime
from pathlib import Path

from tests.trainer.observe.small import interval
from trainer.observe.events import Event
from trainer.observe.lines import LogFile, StreamLines, json_line, text_line


def test_an_interval_as_text() -> None:
    assert text_line(interval()) == (
        "[    12.0 s] step 3  loss 0.50000  grad norm 1.5  5 samples/s  hits 75.0%  exposed 25.0%  2 batches skipped  "
        "ETA 0:00:04"
    )
    wait = {"on": "store reads", "lane": "net-in", "op": "X_FETCH"}
    line = text_line(
        interval(waited_for=wait, eta_s=None, interval_loss=None, loss=None, grad_norm=None, skipped_batches=0)
    )
    assert line == "[    12.0 s] step 3  5 samples/s  hits 75.0%  exposed 25.0% (store reads)"


def test_other_events_as_text() -> None:
    def words(event: Event) -> str | None:
        return text_line(event)

    phase = Event(kind="phase", elapsed_s=0.25, values={"phase": "building the model"})
    assert words(phase) == "[     0.2 s] building the model"
    found = {"checkpoint": "/a/generation-000001/step-00000008", "checkpoint_step": 8, "epoch": 2}
    resumed = Event(kind="phase", elapsed_s=0.25, values={"phase": "resumed", **found})
    line = "[     0.2 s] resumed from the checkpoint of step 8, epoch 2: /a/generation-000001/step-00000008"
    assert words(resumed) == line
    assert words(Event(kind="phase", elapsed_s=0.25, values={**resumed.values, "epoch": None})) == line.replace(
        ", epoch 2", ""
    )
    assert words(Event(kind="checkpoint", elapsed_s=1, step=9, values={"checkpoint_step": 8})) == (
        "[     1.0 s] checkpoint at step 8"
    )
    quality = Event(kind="evaluation", elapsed_s=1, step=9, values={"auc": 0.75, "logloss": 0.5, "left_out": {}})
    assert words(quality) == "[     1.0 s] evaluation at step 9  AUC 0.75000  log loss 0.50000"
    of_labels = {"auc": 0.75, "auc@click": 0.75, "ne@click": 0.9, "auc@buy": 0.5, "left_out": {}}
    assert words(Event(kind="evaluation", elapsed_s=1, step=9, values=of_labels)) == (
        "[     1.0 s] evaluation at step 9  click: AUC 0.75000  NE 0.90000  buy: AUC 0.50000"
    )
    assert words(Event(kind="evaluation", elapsed_s=1, step=9)) == (
        "[     1.0 s] evaluation at step 9  no metric has a value"
    )
    assert words(Event(kind="end", elapsed_s=1)) is None
    assert words(Event(kind="error", elapsed_s=1)) is None


def test_an_event_as_json() -> None:
    event = interval()
    value = json.loads(json_line(event))
    assert datetime.fromisoformat(value.pop("time")).utcoffset() is not None
    head = {"event": "interval", "elapsed_s": 12.04, "step": 3}
    assert value == {**head, **event.values}
    assert "step" not in json.loads(json_line(Event(kind="phase", elapsed_s=0.0)))


def test_lines_are_flushed() -> None:
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Stream()
    lines = StreamLines(stream, text_line, 1.0)
    lines.take(Event(kind="phase", elapsed_s=0, values={"phase": "training"}))
    lines.take(Event(kind="end", elapsed_s=0))
    lines.close(failed=False)
    assert stream.flushed == "[     0.0 s] training\n"
    assert not stream.closed


def test_a_second_start_appends_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        log = LogFile(str(path), 1.0)
        log.take(interval())
        assert path.read_text().endswith("}\n")
        log.close(failed=False)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["interval"] * 2
