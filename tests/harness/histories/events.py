"""`Event` and `Recorder`: what clients began and what came of it, in one order; JSON lines for a file.

An operation is an invocation and at most one completion:

    ok        acknowledged
    fail      refused before anything was sent: it has no effect, now or later
    unknown   an error, or a client that died: it has its effect at some time, or never

An invocation is recorded before anything is sent, a completion after the answer has arrived. So an operation that ended
before another one began did so in reality too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Event", "Kind", "Phase", "Recorder", "from_lines", "to_lines"]


class Phase(Enum):
    """Phase of an operation that an event tells of."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Kind(Enum):
    """Kinds of operations, with the facts of their events."""

    #: Invocation: server, seed, buckets (bucket of each row). Never completed.
    SETTING = "setting"
    #: Invocation: number, job, writer, rows.
    APPEND = "append"
    #: Invocation: rows; ok: lists, torn.
    READ = "read"
    #: Invocation: job, checkpoint (lists that the rows are set to; absent: the rows are kept).
    TAKE_OVER = "take-over"
    #: Invocation: job. Within a takeover: every bucket has the job as its owner.
    ACQUIRED = "acquired"
    #: Invocation: job, writers. The logs of these writers were compared with what they wrote: a rotation or a commit.
    PROOF = "proof"
    #: Invocation: rows, keeps_prefix, restarts. From now until the completion acknowledged appends may go.
    LOSS = "loss"
    #: Invocation: name. Any other fault, for the reader of a file.
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a history.

    Attributes:
        order: position, from 0.
        process: the client; one that was connected anew has another name.
        phase: see `Phase`.
        kind: of the operation.
        operation: order of the operation's invocation.
        facts: see `Kind`; JSON values.
    """

    order: int
    process: str
    phase: Phase
    kind: Kind
    operation: int
    facts: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """Events of concurrent clients. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._next_number = 1

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far."""
        with self._lock:
            return tuple(self._events)

    @property
    def num_appends(self) -> int:
        """Appends invoked so far."""
        return self._next_number - 1

    def invoke(self, process: str, kind: Kind, **facts: Any) -> Event:
        """Record an invocation."""
        with self._lock:
            return self._add(process, Phase.INVOKE, kind, len(self._events), facts)

    def invoke_append(self, process: str, **facts: Any) -> Event:
        """Record the invocation of an append, with its number."""
        with self._lock:
            facts["number"] = self._next_number
            self._next_number += 1
            return self._add(process, Phase.INVOKE, Kind.APPEND, len(self._events), facts)

    def complete(self, invoked: Event, phase: Phase, **facts: Any) -> None:
        """Record the completion of an operation."""
        with self._lock:
            self._add(invoked.process, phase, invoked.kind, invoked.operation, facts)

    def _add(self, process: str, phase: Phase, kind: Kind, operation: int, facts: Mapping[str, Any]) -> Event:
        event = Event(
            order=len(self._events), process=process, phase=phase, kind=kind, operation=operation, facts=facts
        )
        self._events.append(event)
        return event


def to_lines(events: Iterable[Event]) -> str:
    """One JSON object a line."""
    return "".join(
        json.dumps(
            {
                "order": event.order,
                "process": event.process,
                "phase": event.phase.value,
                "kind": event.kind.value,
                "operation": event.operation,
                **event.facts,
            }
        )
        + "\n"
        for event in events
    )


def from_lines(text: str) -> tuple[Event, ...]:
    """Inverse of `to_lines`. Raises ValueError for anything else."""
    events = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            facts = json.loads(line)
            order, process, phase, kind, operation = (
                facts.pop(name) for name in ("order", "process", "phase", "kind", "operation")
            )
            event = Event(
                order=order, process=process, phase=Phase(phase), kind=Kind(kind), operation=operation, facts=facts
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"line {number}: expected an event of a history, got {line[:60]!r}") from error
        events.append(event)
    return tuple(events)
