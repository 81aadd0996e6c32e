"""`FaultSchedule`: which faults a run suffers, when and how, from one number. Pure: the same seed, the same faults.

    FaultSchedule(seed=7, kinds=KINDS, world_size=2).faults ──> (Fault kill-point after-manifest:3 at rank 1, …)

What a fault does is decided by whoever runs the job; the schedule only draws. One fault is armed at a time: the next
once this one has happened, in the same start of the job if it has survived, else in the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bagpipe.util.failpoints import POINTS

__all__ = ["KINDS", "Fault", "FaultKind", "FaultSchedule", "kinds_named"]

MAX_FAULTS = 3

#: How often a point may be passed before it strikes: batches, checkpoints, or once in a recovery.
_BATCH_POINTS = frozenset({"after-fetch", "before-write-back", "mid-write-back", "after-write-back"})
_RECOVERY_POINTS = frozenset({"after-acquire", "mid-recovery", "before-begin", "after-begin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A way for things to go wrong.

    Attributes:
        name: as flags and reports say it.
        weight: how often it is drawn.
        at_point: it strikes at a named point, rather than after a share of the work.
        needs: what must be there: "proxy", "disk", "store-disk", "clock", "agent" (a launcher that restarts ranks).
    """

    name: str
    weight: int = 2
    at_point: bool = False
    needs: str = ""


KINDS = (
    FaultKind(name="kill-trainer", weight=4),
    FaultKind(name="kill-point", weight=8, at_point=True),
    FaultKind(name="kill-rank", weight=3),
    FaultKind(name="kill-agent", weight=1, needs="agent"),
    FaultKind(name="kill-daemon", weight=3),
    FaultKind(name="kill-store", weight=4),
    FaultKind(name="lose-store", weight=3),
    FaultKind(name="kill-all", weight=3),
    FaultKind(name="zombie", weight=4),
    FaultKind(name="flush-store"),
    FaultKind(name="delete-row", weight=3),
    FaultKind(name="rewind-store", weight=3),
    FaultKind(name="tear-checkpoint", weight=5),
    FaultKind(name="fill-disk", needs="disk"),
    FaultKind(name="fill-store-disk", needs="store-disk"),
    FaultKind(name="fill-store-memory", weight=1),
    FaultKind(name="evict-rows"),
    FaultKind(name="network", weight=4, needs="proxy"),
    FaultKind(name="pause-rank"),
    FaultKind(name="pause-daemon", weight=1),
    FaultKind(name="pause-store", weight=1),
    FaultKind(name="clock", weight=1, needs="clock"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them.

    Attributes:
        kind: name of its `FaultKind`.
        at: share of the start's work done by then, in [0, 1).
        point, times: where and at which passage, for those at a point.
        rank: which rank, where one is hit.
        choice: in [0, 1): whatever else there is to choose, such as the byte to flip.
    """

    kind: str
    at: float = 0.0
    point: str = ""
    times: int = 1
    rank: int = 0
    choice: float = 0.0

    def __str__(self) -> str:
        when = f"{self.point}:{self.times}" if self.point else f"{self.at:.2f}"
        return f"{self.kind}@{when}/{self.rank}"


@dataclass(frozen=True, kw_only=True)
class FaultSchedule:
    """The faults of a run.

    Attributes:
        seed: of all that is drawn.
        kinds: to draw from.
        world_size: ranks of the job.
        num_batches, num_checkpoints: of the job.
        num_faults: 0: drawn, from 1 to `MAX_FAULTS`.
    """

    seed: int
    kinds: Sequence[FaultKind] = KINDS
    world_size: int = 1
    num_batches: int = 60
    num_checkpoints: int = 6
    num_faults: int = 0

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """In the order in which they are armed."""
        draw = random.Random(f"faults {self.seed}")
        # Few at a time tell more; several, and what only a second fault can break shows.
        count = self.num_faults or draw.choices(range(1, MAX_FAULTS + 1), weights=(5, 3, 2))[0]
        return tuple(self._draw(draw, is_later=number > 0) for number in range(count))

    def _draw(self, draw: random.Random, *, is_later: bool) -> Fault:
        kind = draw.choices(self.kinds, weights=[kind.weight for kind in self.kinds])[0]
        at, rank, choice = draw.random(), draw.randrange(self.world_size), draw.random()
        if not kind.at_point:
            return Fault(kind=kind.name, at=at, rank=rank, choice=choice)
        # The first start has nothing to recover, beyond the empty checkpoint it begins with.
        points = [point for point in POINTS if is_later or point not in _RECOVERY_POINTS]
        point = draw.choice(points)
        most = self.num_batches if point in _BATCH_POINTS else self.num_checkpoints
        times = 1 if point in _RECOVERY_POINTS else 1 + int(at * most)
        return Fault(kind=kind.name, point=point, times=times, rank=rank, choice=choice)


def kinds_named(names: str) -> tuple[FaultKind, ...]:
    """Kinds of a comma-separated list; all of them if it is empty.

    Raises:
        ValueError: there is no such kind.
    """
    known = {kind.name: kind for kind in KINDS}
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise ValueError(f"expected kinds of fault among {', '.join(known)}, got {name!r}")
    return tuple(known[name] for name in chosen) or KINDS
