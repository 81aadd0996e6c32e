"""A sink that keeps events, a clock that is set, and progress."""

from __future__ import annotations

from typing import Any

import torch

from bagpipe.training.progress import Progress
from trainer.observe.events import Event
from trainer.observe.meter import LossSoFar, Meter


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept:
    """Keeps what it is told; fails at the events of one kind."""

    def __init__(self, every_s: float = 0.0, fails_at: str = "") -> None:
        self.every_s = every_s
        self.events: list[Event] = []
        self.closed: list[bool] = []
        self._fails_at = fails_at

    def take(self, event: Event) -> None:
        if event.kind == self._fails_at:
            raise OSError("no space\nleft")
        self.events.append(event)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)

    def told(self) -> list[tuple[str, int | None]]:
        return [(event.kind, event.step) for event in self.events]


def progress(**values: Any) -> Progress:
    given: dict[str, Any] = {
        "steps": 3, "samples": 10, "loss_sum": torch.tensor(5.0), "rows_unique": 4, "rows_inserted": 1, "rows_found": 1,
        "rows_fetched": 1, "rows_written": 0, "evictions_waiting": 3, "elapsed_s": 2.0, "exposed_s": 0.5,
        "skipped_batches": 2, "loss_scale": 512,
    }  # fmt: skip
    return Progress(**{**given, **values})


def interval(**values: Any) -> Event:
    """The event of `progress`, 2 seconds after the start of a job of 9 steps."""
    loss = LossSoFar(loss_sum=5.0, samples=10, gradient_norm=1.5)
    measured = Meter(0.0, num_steps=9).measure(2.0, progress(), loss)
    rates = {"dense_lr": 0.5, "rows_lr": 0.25, "rows_lr_by_table": {"user": 0.125}}
    return Event(kind="interval", elapsed_s=12.04, step=3, values={**measured, **rates, **values})
