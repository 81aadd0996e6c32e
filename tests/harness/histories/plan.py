"""`Plan`: the server, the clients and the faults of a history, drawn from its seed. Pure.

The seed decides what is done, not how the machine schedules it: a history with an anomaly may need a few repetitions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FAULT_KINDS", "SERVER_KINDS", "FaultKind", "Plan", "PlannedFault", "draw_plan"]

_ON_ITS_OWN = frozenset({"memory", "everysec", "always", "pair", "memory-pair"})
_CLUSTER = frozenset({"cluster"})

#: Kinds of servers -> how often each is drawn.
SERVER_KINDS = {"memory": 3, "everysec": 2, "always": 3, "pair": 2, "memory-pair": 2, "cluster": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        name: in flags and reports.
        servers: kinds that it can happen to.
        takes_over: another job takes the namespace over afterwards, whatever became of this one. (After
            pause-writers it already has.)
        is_single: at most one fault of this sort in a history: they change the roles of a cluster's nodes.
        undoes: it needs checkpoints.
    """

    name: str
    servers: frozenset[str] = _ON_ITS_OWN | _CLUSTER
    takes_over: bool = False
    is_single: bool = False
    undoes: bool = False


FAULT_KINDS = (
    FaultKind(name="kill-server", servers=_ON_ITS_OWN),
    FaultKind(name="kill-syncing-server", servers=frozenset({"everysec"})),
    FaultKind(name="kill-syncing-checkpoint", servers=frozenset({"everysec"}), undoes=True),
    FaultKind(name="kill-server-in-take-over", servers=_ON_ITS_OWN, takes_over=True),
    FaultKind(name="cut"),
    FaultKind(name="cut-take-over", takes_over=True),
    FaultKind(name="kill-writers", takes_over=True),
    FaultKind(name="pause-writers"),
    FaultKind(name="take-over", takes_over=True),
    FaultKind(name="no-commit", takes_over=True, undoes=True),
    FaultKind(name="fail-over", servers=_CLUSTER, is_single=True),
    FaultKind(name="lagging-fail-over", servers=_CLUSTER, is_single=True),
    FaultKind(name="lagging-checkpoint", servers=_CLUSTER, is_single=True, undoes=True),
    FaultKind(name="fail-over-in-take-over", servers=_CLUSTER, takes_over=True, is_single=True),
    FaultKind(name="hand-over", servers=_CLUSTER, is_single=True),
    FaultKind(name="isolate-master", servers=_CLUSTER, is_single=True),
    FaultKind(name="move-slot", servers=_CLUSTER, is_single=True),
    FaultKind(name="move-slot-in-take-over", servers=_CLUSTER, takes_over=True, is_single=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault.

    Attributes:
        kind: see `FAULT_KINDS`.
        after: appends before it.
    """

    kind: FaultKind
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A history to make.

    Attributes:
        seed: of the history.
        server: kind of server.
        num_writers: of each job.
        num_readers: clients that only read.
        undoes: jobs make checkpoints, and a takeover sets the rows to the newest; else it keeps them as they are.
        refetches: writers read rows again before some writes.
        faults: in order.
    """

    seed: int
    server: str
    num_writers: int
    num_readers: int
    undoes: bool
    refetches: bool
    faults: tuple[PlannedFault, ...]

    def __str__(self) -> str:
        """The facts of a report's line."""
        faults = ", ".join(fault.kind.name for fault in self.faults)
        return f"{self.server:11} {self.num_writers}w {'undo' if self.undoes else 'keep'}  {faults}"


def draw_plan(seed: int, *, servers: Sequence[str] = (), kinds: Sequence[str] = ()) -> Plan:
    """The plan of a seed.

    Args:
        seed: of the history.
        servers: kinds to draw from; none: all.
        kinds: names of faults to draw from; none: all.

    Raises:
        ValueError: an unknown name, or no fault is possible.
    """
    for given, known in ((servers, list(SERVER_KINDS)), (kinds, [kind.name for kind in FAULT_KINDS])):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"expected names among {', '.join(known)}, got {', '.join(unknown)}")
    draw = random.Random(f"history {seed}")
    wanted = [kind for kind in FAULT_KINDS if not kinds or kind.name in kinds]
    chosen = [name for name in servers or SERVER_KINDS if any(name in kind.servers for kind in wanted)]
    if not chosen:
        raise ValueError(f"none of these faults can happen to {', '.join(servers)}: {', '.join(kinds)}")
    server = draw.choices(chosen, weights=[SERVER_KINDS[name] for name in chosen])[0]
    possible = [kind for kind in wanted if server in kind.servers]
    undoes = draw.random() < 0.5 or all(kind.undoes for kind in possible)
    possible = [kind for kind in possible if undoes or not kind.undoes]
    faults = []
    for _ in range(draw.randint(2, 4)):
        if possible:
            kind = draw.choice(possible)
            faults.append(PlannedFault(kind=kind, after=draw.randint(4, 30)))
            if kind.is_single:
                possible = [other for other in possible if not other.is_single]
    # A row that was read from an isolated master, and written, would take acknowledged appends from the row: the
    # store's logs do not show that. A job's row sums do.
    is_isolated = any(fault.kind.name == "isolate-master" for fault in faults)
    return Plan(
        seed=seed,
        server=server,
        num_writers=draw.randint(1, 2),
        num_readers=2,
        undoes=undoes,
        refetches=not is_isolated and draw.random() < 0.5,
        faults=tuple(faults),
    )
