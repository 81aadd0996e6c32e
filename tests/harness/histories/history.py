"""`History`: the operations of a history, paired from its events. Pure.

An operation that was never completed ends at `NEVER`: an append can take effect until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.harness.histories.events import Event, Kind, Phase
from tests.harness.histories.rows import Lists

__all__ = ["NEVER", "Append", "History", "Loss", "Proof", "Read", "TakeOver", "paired"]

#: Order of what did not happen.
NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """One write of one or several rows.

    Attributes:
        start, end: orders of invocation and completion.
        phase: of its completion; UNKNOWN without one.
        number: of the append, unique.
        job, writer: who appended.
        rows: ids.
    """

    start: int
    end: int
    phase: Phase
    number: int
    job: int
    writer: int
    rows: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One acknowledged read of one or several rows.

    Attributes:
        start, end, process: as in `Event`.
        lists: by row, without torn rows.
        torn: rows that no single write made.
    """

    start: int
    end: int
    process: str
    lists: Lists
    torn: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """A start of a job.

    Attributes:
        start, end: `end` is `NEVER` if it failed.
        acquired: order after which earlier jobs can write no more; `NEVER` if that is not known.
        job: number of the start; later ones are greater.
        checkpoint: the lists that rows were set to, nothing for other rows; None: rows were kept.
    """

    start: int
    end: int
    acquired: int = NEVER
    job: int
    checkpoint: Lists | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """An acknowledged rotation or commit of a job: the logs of its writers had the expected lengths."""

    start: int
    job: int
    writers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A fault that may take acknowledged appends from rows.

    Attributes:
        start, end: `NEVER` while it goes on.
        rows: ids.
        keeps_prefix: what is left is what the first groups wrote, and no stale server answers meanwhile.
        restarts: the server is started again, so its clients must connect anew.
    """

    start: int
    end: int
    rows: frozenset[int]
    keeps_prefix: bool = True
    restarts: bool = False

    def covers(self, row: int, start: int, end: int) -> bool:
        """Whether it may take something from a row at some time in ``[start, end]``."""
        return row in self.rows and self.start < end and self.end > start


@dataclass(frozen=True, kw_only=True)
class History:
    """Operations by kind, each in order of invocation.

    Attributes:
        buckets: bucket of each row.
        sessions: by process, the orders at which it got an answer.
    """

    buckets: Mapping[int, int]
    appends: tuple[Append, ...] = ()
    reads: tuple[Read, ...] = ()
    takeovers: tuple[TakeOver, ...] = ()
    proofs: tuple[Proof, ...] = ()
    losses: tuple[Loss, ...] = ()
    sessions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def numbered(self) -> Mapping[int, Append]:
        """Appends by number."""
        return {append.number: append for append in self.appends}

    @cached_property
    def undoes(self) -> tuple[tuple[TakeOver, int], ...]:
        """Takeovers that set rows to a checkpoint, each with the order at which the rows are set for certain."""
        ends = [each.end for each in self.takeovers if each.end != NEVER]
        return tuple(
            (each, min((end for end in ends if end > each.start), default=NEVER) if each.end == NEVER else each.end)
            for each in self.takeovers
            if each.checkpoint is not None
        )


def paired(events: Iterable[Event]) -> History:
    """The history of these events.

    Raises:
        ValueError: a completion without an invocation, two of one operation, or no setting.
    """
    invoked: dict[int, Event] = {}
    completed: dict[int, Event] = {}
    for event in events:
        if event.phase is Phase.INVOKE:
            invoked[event.operation] = event
        elif event.operation not in invoked or event.operation in completed:
            raise ValueError(f"event {event.order} completes operation {event.operation}, which is not under way")
        else:
            completed[event.operation] = event
    settings = [event for event in invoked.values() if event.kind is Kind.SETTING]
    if len(settings) != 1:
        raise ValueError(f"expected one setting, got {len(settings)}")
    pairs = [(event, completed.get(event.operation)) for event in invoked.values()]
    acknowledged = [(event, end) for event, end in pairs if end is not None and end.phase is Phase.OK]
    acquired = {int(event.facts["job"]): event.order for event in invoked.values() if event.kind is Kind.ACQUIRED}
    sessions: dict[str, list[int]] = {}
    for event, end in acknowledged:
        sessions.setdefault(event.process, []).append(end.order)
    return History(
        buckets={int(row): int(bucket) for row, bucket in settings[0].facts["buckets"].items()},
        appends=tuple(_append(event, end) for event, end in pairs if event.kind is Kind.APPEND),
        reads=tuple(_read(event, end) for event, end in acknowledged if event.kind is Kind.READ),
        takeovers=tuple(_takeover(event, end, acquired) for event, end in pairs if event.kind is Kind.TAKE_OVER),
        proofs=tuple(_proof(event) for event, _ in acknowledged if event.kind is Kind.PROOF),
        losses=tuple(_loss(event, end) for event, end in pairs if event.kind is Kind.LOSS),
        sessions={process: tuple(sorted(orders)) for process, orders in sessions.items()},
    )


def _append(event: Event, end: Event | None) -> Append:
    facts = event.facts
    phase = Phase.UNKNOWN if end is None else end.phase
    return Append(
        start=event.order,
        end=NEVER if end is None else end.order,
        phase=phase,
        number=int(facts["number"]),
        job=int(facts["job"]),
        writer=int(facts["writer"]),
        rows=frozenset(map(int, facts["rows"])),
    )


def _read(event: Event, end: Event) -> Read:
    return Read(
        start=event.order,
        end=end.order,
        process=event.process,
        lists=_lists(end.facts["lists"]),
        torn=tuple(end.facts["torn"]),
    )


def _takeover(event: Event, end: Event | None, acquired: Mapping[int, int]) -> TakeOver:
    job, checkpoint = int(event.facts["job"]), event.facts.get("checkpoint")
    return TakeOver(
        start=event.order,
        end=end.order if end is not None and end.phase is Phase.OK else NEVER,
        acquired=acquired.get(job, NEVER),
        job=job,
        checkpoint=None if checkpoint is None else _lists(checkpoint),
    )


def _proof(event: Event) -> Proof:
    return Proof(start=event.order, job=int(event.facts["job"]), writers=frozenset(event.facts["writers"]))


def _loss(event: Event, end: Event | None) -> Loss:
    return Loss(
        start=event.order,
        end=NEVER if end is None else end.order,
        rows=frozenset(map(int, event.facts["rows"])),
        keeps_prefix=bool(event.facts["keeps_prefix"]),
        restarts=bool(event.facts["restarts"]),
    )


def _lists(facts: Mapping[Any, Iterable[int]]) -> dict[int, tuple[int, ...]]:
    return {int(row): tuple(numbers) for row, numbers in facts.items()}
