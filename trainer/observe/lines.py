"""Lines of text or JSON, one per event, each flushed when it is written.

text    [    12.0 s] step 1200  loss 0.48210  51,200 samples/s  hits 93.1%  exposed 4.0% (store reads)  ETA 0:03:20
json    {"time": "…Z", "event": "interval", "elapsed_s": 12.0, "step": 1200, "samples_per_s": 51200.0, …}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TextIO

from bagpipe.util.outputs import reason_of
from bagpipe.util.printing import printable
from trainer.metrics import METRICS, by_label
from trainer.observe.events import Event, Kind

__all__ = ["LogFile", "StreamLines", "json_line", "text_line"]


class StreamLines:
    """Writes events to a stream.

    Args:
        stream: where to; not closed.
        form: the line of an event, without its end; None: it has none.
        every_s: time between two intervals.
    """

    def __init__(self, stream: TextIO, form: Callable[[Event], str | None], every_s: float) -> None:
        self.every_s = every_s
        self._stream = stream
        self._form = form

    def take(self, event: Event) -> None:
        line = self._form(event)
        if line is not None:
            self._stream.write(printable(line) + "\n")
            self._stream.flush()

    def close(self, *, failed: bool) -> None:
        """Nothing: the stream is the caller's."""


class LogFile(StreamLines):
    """Appends events to a file, as JSON. A job that is started again goes on with the file."""

    def __init__(self, path: str, every_s: float) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 # `close` does
        self._path = path
        self._has_failed = False
        super().__init__(self._file, json_line, every_s)

    def take(self, event: Event) -> None:
        with self._naming():
            super().take(event)

    def close(self, *, failed: bool) -> None:
        with suppress(OSError) if self._has_failed else self._naming():  # what is buffered fails once more
            self._file.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the file in an error of its disk."""
        try:
            yield
        except OSError as error:
            self._has_failed = True
            raise OSError(f"run.log: cannot write {self._path}: {reason_of(error)}") from None


def json_line(event: Event) -> str:
    """An event as one JSON object. Times are UTC."""
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
    head = {"time": f"{stamp}.{int(now_s % 1 * 1000):03d}Z", "event": event.kind}
    step = {} if event.step is None else {"step": event.step}
    return json.dumps({**head, "elapsed_s": round(event.elapsed_s, 3), **step, **event.values})


def text_line(event: Event) -> str | None:
    """An event as text. The end and errors have none: the program prints them itself."""
    words = _TEXTS[event.kind](event) if event.kind in _TEXTS else None
    return None if words is None else f"[{event.elapsed_s:8.1f} s] {words}"


def interval_words(values: Mapping[str, Any]) -> list[str]:
    """The words of an interval's line after the step."""
    words = []
    loss = values["loss"] if values["interval_loss"] is None else values["interval_loss"]
    if loss is not None:
        words.append(f"loss {loss:.5f}")
    if values.get("grad_norm") is not None:
        words.append(f"grad norm {values['grad_norm']:.4g}")
    words.append(f"{values['samples_per_s']:,.0f} samples/s")
    if values["interval_hit_rate"] is not None:
        words.append(f"hits {values['interval_hit_rate']:.1%}")
    wait = values["waited_for"]
    words.append(f"exposed {values['interval_exposed_share']:.1%}" + (f" ({wait['on']})" if wait else ""))
    if values.get("schedule_lr") is not None:
        words.append(f"lr {values['schedule_lr']:.3g}")
    if values["skipped_batches"]:
        words.append(f"{values['skipped_batches']} batches skipped")
    if values["eta_s"] is not None:
        words.append(f"ETA {timedelta(seconds=round(values['eta_s']))}")
    return words


def _quality_words(event: Event) -> str:
    found = []
    for label, values in by_label(event.values).items():
        words = [f"{METRICS[name].title} {value:.5f}" for name, value in values.items()]
        found += [f"{label}: {words[0]}", *words[1:]] if label else words
    return "  ".join([f"evaluation at step {event.step}", *(found or ["no metric has a value"])])


def _phase_words(event: Event) -> str:
    phase, values = event.values["phase"], event.values
    if "checkpoint" in values:
        epoch = "" if values["epoch"] is None else f", epoch {values['epoch']}"
        return f"{phase} from the checkpoint of step {values['checkpoint_step']}{epoch}: {values['checkpoint']}"
    return ": ".join([phase, *filter(None, [values.get("server")])])


_TEXTS: Mapping[Kind, Callable[[Event], str]] = {
    "phase": _phase_words,
    "interval": lambda event: "  ".join([f"step {event.step}", *interval_words(event.values)]),
    "checkpoint": lambda event: f"checkpoint at step {event.values['checkpoint_step']}",
    "evaluation": _quality_words,
}
