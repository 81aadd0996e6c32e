"""`Event`: one thing a job says about itself; `Sink`: who is told. The fields of each kind: docs/monitoring.md.

kind         when
phase        a part of the job begins: starting services, building the model, training, …
interval     while training, at the pace of the sink
checkpoint   a checkpoint is published
evaluation   the held-out examples are scored
end          the result is known
error        the job fails
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Event", "Kind", "Sink"]

Kind = Literal["phase", "interval", "checkpoint", "evaluation", "end", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event.

    Attributes:
        kind: what happened.
        elapsed_s: seconds since the process began to report.
        step: batches trained, of the whole job; None before training.
        values: the other fields by name, JSON-able.
    """

    kind: Kind
    elapsed_s: float
    step: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """Takes events. One thread calls it.

    Attributes:
        every_s: shortest time between two of its `interval` events.
    """

    every_s: float

    def take(self, event: Event) -> None:
        """Tell an event. An exception ends the sink, not the job."""

    def close(self, *, failed: bool) -> None:
        """Release the sink. No event follows. `failed`: the job ends with an error."""
