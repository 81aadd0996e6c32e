"""`Program`: a finite schedule: ordered actions per resource, and the dependencies between them.

    lanes: resource -> ordered actions              a resource runs one action at a time
    edges: (stage, op) -> (stage, op), delay        dependencies, resolved per index

An edge is a *template*: with ``X_INSERT -> F, delay 0`` every F of batch b waits for X_INSERT of batch b. Ops count in
different units (M micro-batches of a stage, or 1 batch). An action waits for the source units whose share of the batch
overlaps its own. This covers batch to micro-batch, micro-batch to batch, and stages with different micro-batches. An
edge can name the units itself: gathers of parameters serve runs of micro-batches in the order of a lane. Layers of a
stage are no shares of the batch: their edges lead to or from all units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS, Unit

__all__ = [
    "Edge",
    "EdgeKind",
    "Hazards",
    "OpKey",
    "Program",
    "Resource",
    "ResourceKind",
    "Semantics",
    "Stage",
    "UnitCounts",
    "overlapping_units",
    "unit_counts",
    "units_per_batch",
]

ResourceKind = Literal["cpu", "nic", "disk", "copy", "gpu"]
EdgeKind = Literal["data", "capacity", "hazard"]
#: ``sync``: all actions of a batch use the weights that all earlier batches produced.
Semantics = Literal["sync", "delay", "stash", "predict", "partial"]

#: (stage, op): the ends of edges, and the key of progress counters.
OpKey = tuple[int, str]

#: Unit of an op -> stage number -> such units per batch; a missing stage has 1.
UnitCounts = Mapping[Unit, Mapping[int, int]]

#: Hazard name -> function of the waiting batch that returns the batch to wait for (-1: none).
Hazards = Mapping[str, Callable[[int], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Resource of a lane. It executes one action at a time.

    Attributes:
        name: the lane's name.
        kind: ``gpu`` and ``copy`` lanes enqueue work on a device stream; on other lanes an action is complete when it
            returns.
    """

    name: str
    kind: ResourceKind = "cpu"

    @property
    def on_device(self) -> bool:
        return self.kind in ("gpu", "copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the model or of the row handling; its actions carry its number.

    Attributes:
        number: the number in the actions' text.
        name: for people.
        micro_per_batch: micro-batches per batch.
        shares: number of the stage whose parameters this one uses; None: it has its own.
        part, parts: which part of each micro-batch it takes, of how many.
        gathers: times that its parameters are gathered per batch.
        layers: layers whose gradients are preconditioned.
    """

    number: int
    name: str = ""
    micro_per_batch: int = 1
    shares: int | None = None
    part: int = 0
    parts: int = 1
    gathers: int = 1
    layers: int = 1

    @property
    def parameters(self) -> int:
        """Number of the stage whose parameters this one uses."""
        return self.number if self.shares is None else self.shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`dst` of batch b waits for `src` of batch ``b - delay``; for a hazard, of a batch that only the plan knows.

    Attributes:
        src, dst: op names.
        src_stage, dst_stage: their stages.
        delay: in batches, at least 0. None only for a hazard: absent in static analysis. A hazard's number stands in
            for the plan in checks and simulation.
        kind: ``data``: dst uses what src made. ``capacity``: src frees the buffer dst fills; delay is the number of
            buffers. ``hazard``: src and dst touch the same rows in some batches.
        hazard: the hazard's name, empty for the other kinds.
        units: (source unit, waiting unit) of a batch; empty: units whose shares of the batch overlap.
    """

    src: str
    dst: str
    src_stage: int = 0
    dst_stage: int = 0
    delay: int | None = 0
    kind: EdgeKind = "data"
    hazard: str = ""
    units: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.delay is not None and self.delay < 0:
            raise ScheduleError(f"edge {self.text}: delay must be at least 0, got {self.delay}")
        if self.kind == "capacity" and not self.delay:
            raise ScheduleError(f"edge {self.text}: a capacity must be at least 1, got {self.delay}")
        if (self.kind == "hazard") != bool(self.hazard):
            raise ScheduleError(f"edge {self.text}: a hazard edge, and only that, needs a hazard name")
        if self.delay is None and self.kind != "hazard":
            raise ScheduleError(f"edge {self.text}: only a hazard may leave its delay to the plan")

    @property
    def src_key(self) -> OpKey:
        return (self.src_stage, self.src)

    @property
    def dst_key(self) -> OpKey:
        return (self.dst_stage, self.dst)

    def source_units(self, unit: int, units: int, src_units: int) -> Iterable[int]:
        """Units of the source that a unit waits for, out of `units` of the waiting op and `src_units` of the source."""
        if self.units:
            return [source for source, waiting in self.units if waiting == unit]
        if OPS[self.dst].unit == "layer" or OPS[self.src].unit == "layer":
            return range(src_units)
        return overlapping_units(unit, units, src_units)

    @property
    def text(self) -> str:
        """``0X_FETCH(b) <- 0X_INSERT(b-4) capacity``."""
        when = f"b-{self.delay}" if self.delay else "b" if self.delay == 0 else self.hazard
        label = "" if self.kind == "data" else f" {self.kind} {self.hazard}".rstrip()
        return f"{self.dst_stage}{self.dst}(b) <- {self.src_stage}{self.src}({when}){label}"


def overlapping_units(unit: int, units: int, src_units: int) -> range:
    """Source units (0 <= n < src_units) whose share of a batch overlaps that of `unit` out of `units`."""
    return range(unit * src_units // units, -((unit + 1) * src_units // -units))


#: Steps from a RECV's stage to the sending stage, for ops that do not name it.
_SENDERS: Mapping[str, int] = {"RECV_F": -1, "RECV_B": 1}


def units_per_batch(counts: UnitCounts, key: OpKey, peer: int | None = None) -> int:
    """Units of (stage, op) per batch: 1, the stage's micro-batches, the gathers of its parameters, or its layers.

    Messages count micro-batches of the sending stage, on both sides.

    Args:
        counts: of the stages; see `unit_counts`.
        key: stage and op.
        peer: the stage at the other end, for ops that name one.
    """
    stage, name = key
    op = OPS[name]
    if op.unit == "batch":
        return 1
    if op.role == "recv":
        stage = peer if peer is not None else stage + _SENDERS.get(name, 0)
    return counts[op.unit].get(stage, 1)


def unit_counts(stages: Iterable[Stage]) -> UnitCounts:
    """Units per batch of all stages, by unit."""
    stages = tuple(stages)
    return {
        "micro": {stage.number: stage.micro_per_batch for stage in stages},
        "gather": {stage.number: stage.gathers for stage in stages if stage.gathers > 1},
        "layer": {stage.number: stage.layers for stage in stages if stage.layers > 1},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A finite schedule.

    Attributes:
        lanes: resource name -> its actions in execution order.
        resources: the lanes' resources; a lane without one is a cpu lane.
        edges: dependencies besides the order inside each lane.
        stages: the stages; a stage that is not listed has one micro-batch per batch.
        semantics: which weights an action uses.
    """

    lanes: Mapping[str, tuple[Action, ...]]
    edges: tuple[Edge, ...] = ()
    stages: tuple[Stage, ...] = ()
    resources: tuple[Resource, ...] = ()
    semantics: Semantics = "sync"

    @property
    def micro_per_batch(self) -> Mapping[int, int]:
        """Stage number -> micro-batches per batch."""
        return {stage.number: stage.micro_per_batch for stage in self.stages}

    def units_per_batch(self, key: OpKey, peer: int | None = None) -> int:
        """Units of (stage, op) per batch; see `units_per_batch`."""
        return units_per_batch(unit_counts(self.stages), key, peer)

    def atoms(self) -> list[Action]:
        """All actions of all lanes, with overlaps replaced by their parts."""
        return [atom for actions in self.lanes.values() for action in actions for atom in action.atoms]

    def num_batches(self) -> int:
        """Number of batches that the indices span."""
        counts = unit_counts(self.stages)
        indexed = [(atom, atom.index) for atom in self.atoms() if atom.index is not None]
        return max(
            (index // units_per_batch(counts, (atom.stage, atom.op), atom.peer) + 1 for atom, index in indexed),
            default=0,
        )
