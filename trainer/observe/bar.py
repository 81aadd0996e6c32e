"""`Bar`: the progress bar of a terminal, with the phase, rates, loss, hit rate, exposed time and remaining time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

from trainer.observe.events import Event, Kind
from trainer.observe.lines import interval_words, text_line

__all__ = ["Bar"]


class Bar:
    """Shows events on stderr.

    Args:
        every_s: time between two updates.
        label: prefix of the bar; empty: none.
    """

    def __init__(self, every_s: float, label: str = "") -> None:
        self.every_s = every_s
        self._label = label
        self._bar: tqdm[Any] = tqdm(unit=" samples", unit_scale=True, desc=label or "starting", mininterval=0)

    def take(self, event: Event) -> None:
        show = _SHOWS.get(event.kind)
        if show is not None:
            show(self, event)

    def close(self, *, failed: bool) -> None:
        self._bar.close()

    def _phase(self, event: Event) -> None:
        phase = str(event.values["phase"])
        if "checkpoint" in event.values:
            self._line(event)
        self._bar.set_description_str(f"{self._label}: {phase}" if self._label else phase)
        if "samples" in event.values:  # training begins; a resumed job goes on where it was
            self._bar.reset()
            self._bar.n = self._bar.initial = event.values["samples"]
        self._bar.refresh()

    def _interval(self, event: Event) -> None:
        # The bar itself shows the rate.
        words = [word for word in interval_words(event.values) if "samples/s" not in word]
        self._bar.set_postfix_str(", ".join([f"step {event.step}", *words]), refresh=False)
        self._bar.update(event.values["samples"] - self._bar.n)

    def _line(self, event: Event) -> None:
        self._bar.write(text_line(event) or "", file=self._bar.fp)


_SHOWS: Mapping[Kind, Callable[[Bar, Event], None]] = {
    "phase": Bar._phase,
    "interval": Bar._interval,
    "checkpoint": Bar._line,
    "evaluation": Bar._line,
}
