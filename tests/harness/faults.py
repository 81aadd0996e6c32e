"""`FaultSchedule`: the faults of a run and their times, drawn from a seed. Pure: equal seeds give equal faults.

    FaultSchedule(seed=7, kinds=KINDS, world_size=2).faults ──> (Fault kill-point after-manifest:3 at rank 1, …)

The runner decides what a fault does; the schedule only draws. One fault is armed at a time: the next one after this one
has fired, in the same start of the job if it survives, otherwise in the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bagpipe.util.failpoints import POINTS

__all__ = ["KINDS", "Fault", "FaultKind", "FaultSchedule", "kinds_named"]

MAX_FAULTS = 3

#: Upper bounds of passes before a failpoint fires: batches, checkpoints, or once in a recovery.
_BATCH_POINTS = frozenset({"after-fetch", "before-write-back", "mid-write-back", "after-write-back"})
_RECOVERY_POINTS = frozenset({"after-acquire", "mid-recovery", "before-begin", "after-begin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        name: in flags and reports.
        weight: relative frequency.
        at_point: fires at a failpoint, rather than after a share of the work.
        needs: required parts: "proxy", "disk", "store-disk", "clock", "agent" (a launcher that restarts ranks).
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
    """One fault of a run.

    Attributes:
        kind: name of its `FaultKind`.
        at: share of the start's work done before it fires, in [0, 1).
        point, times: failpoint and pass, for those at a failpoint.
        rank: the rank it hits, if it hits one.
        choice: in [0, 1): any other random choice, such as the byte to flip.
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
        seed: of all draws.
        kinds: to draw from.
        world_size: ranks of the job.
        num_batches, num_checkpoints: of the job.
        num_faults: 0: drawn from 1 to `MAX_FAULTS`.
    """

    seed: int
    kinds: Sequence[FaultKind] = KINDS
    world_size: int = 1
    num_batches: int = 60
    num_checkpoints: int = 6
    num_faults: int = 0

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """Faults in the order in which they are armed."""
        draw = random.Random(f"faults {self.seed}")
        # Runs of few faults are easier to explain; several faults find failures that need a second fault.
        count = self.num_faults or draw.choices(range(1, MAX_FAULTS + 1), weights=(5, 3, 2))[0]
        return tuple(self._draw(draw, is_later=number > 0) for number in range(count))

    def _draw(self, draw: random.Random, *, is_later: bool) -> Fault:
        kind = draw.choices(self.kinds, weights=[kind.weight for kind in self.kinds])[0]
        at, rank, choice = draw.random(), draw.randrange(self.world_size), draw.random()
        if not kind.at_point:
            return Fault(kind=kind.name, at=at, rank=rank, choice=choice)
        # The first start only recovers the initial empty checkpoint.
        points = [point for point in POINTS if is_later or point not in _RECOVERY_POINTS]
        point = draw.choice(points)
        most = self.num_batches if point in _BATCH_POINTS else self.num_checkpoints
        times = 1 if point in _RECOVERY_POINTS else 1 + int(at * most)
        return Fault(kind=kind.name, point=point, times=times, rank=rank, choice=choice)


def kinds_named(names: str) -> tuple[FaultKind, ...]:
    """Kinds in a comma-separated list; all kinds if it is empty.

    Raises:
        ValueError: unknown kind.
    """
    known = {kind.name: kind for kind in KINDS}
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise ValueError(f"expected kinds of fault among {', '.join(known)}, got {name!r}")
    return tuple(known[name] for name in chosen) or KINDS
