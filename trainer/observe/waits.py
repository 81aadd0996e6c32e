"""The cause of the computation's waits: the first busy lane behind those of the compute lanes.

compute waits for 0X_INSERT ─> lane copy waits for 0X_FETCH ─> lane net-in was busy: the store
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagpipe.pipeline.report import LaneReport

__all__ = ["Wait", "waited_for"]

#: Operation -> (its lane, who does its work), for operations that bring rows.
_WORKERS: Mapping[str, tuple[str, str]] = {
    "X_READ": ("data", "cacher"),
    "X_FETCH": ("net-in", "store reads"),
    "X_EVICT": ("copy", "cache copies"),
    "X_INSERT": ("copy", "cache copies"),
    "X_WRITEBACK": ("net-out", "store writes"),
    "X_ACK": ("ack", "other ranks' store writes"),
    "X_PREPULL": ("pull", "other ranks"),
    "X_PULL": ("pull", "other ranks"),
    "X_PUSH": ("push", "other ranks"),
    "X_PUSH_LATE": ("push", "other ranks"),
    "X_NORM": ("push", "other ranks"),
    "X_UPDATE_LATE": ("push", "row updates"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The cause of most of the waits.

    Attributes:
        on: who was waited for: the cacher, the store, other ranks, …
        lane, op: the lane that was busy, and its operation.
    """

    on: str
    lane: str
    op: str


def waited_for(before: Mapping[str, LaneReport], now: Mapping[str, LaneReport]) -> Wait | None:
    """The cause of most waits of the compute lanes between two reports; None: they waited for nothing that brings rows.

    Args:
        before: reports by lane; empty: from the start.
        now: later reports of the same lanes.
    """
    waits_s: dict[str, float] = {}
    for name, lane in now.items():
        if name.startswith("compute"):
            for op, wait_s in _waits_s(before.get(name), lane).items():
                waits_s[op] = waits_s.get(op, 0.0) + wait_s
    if not waits_s:
        return None
    op = max(waits_s, key=lambda name: waits_s[name])
    seen: set[str] = set()
    while True:
        name, on = _WORKERS[op]
        seen.add(name)
        cause = _cause(before.get(name), now[name]) if name in now else None
        if cause is None or _WORKERS[cause][0] in seen:
            return Wait(on=on, lane=name, op=op)
        op = cause


def _cause(before: LaneReport | None, now: LaneReport) -> str | None:
    """The operation that a lane waited for longer than it was busy; None: it was busy."""
    waits_s = _waits_s(before, now)
    op = max(waits_s, key=lambda name: waits_s[name], default=None)
    busy_s = now.busy_s - (before.busy_s if before is not None else 0.0)
    return op if op is not None and waits_s[op] > busy_s else None


def _waits_s(before: LaneReport | None, now: LaneReport) -> dict[str, float]:
    """The times waited for operations that bring rows, by operation without its stage."""
    found: dict[str, float] = {}
    for name, wait_s in now.waits_s.items():
        op = name.lstrip("0123456789")
        more_s = wait_s - (before.waits_s.get(name, 0.0) if before is not None else 0.0)
        if op in _WORKERS and more_s > 0:
            found[op] = found.get(op, 0.0) + more_s
    return found
