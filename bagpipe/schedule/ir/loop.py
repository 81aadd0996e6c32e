"""`Loop`: the steady state of a pipeline. Every lane repeats its templates for batch 0, 1, 2, ….

    Loop.lanes: resource -> templates of one turn ──unroll(n)──> Program of n batches
                                                  └─runner─────> the same actions until the source has no more batches

Dependencies and capacity edges alone bound how far a lane runs ahead of another. A template's offset shifts its batch
inside the lane: with offset 2, turn b does batch b + 2, with offset -1 batch b - 1. This makes a software pipeline of
one lane, or an asynchronous schedule whose forwards of batch b + 1 precede backwards of batch b. In the first turns
only actions with a batch >= 0 are done.

A lane can leave a part of its turn open: `Template.track`. Its templates then have one of the possible orders, which
`unroll` shows; the runner takes what is ready.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import (
    Edge,
    OpKey,
    Program,
    Resource,
    Semantics,
    Stage,
    unit_counts,
    units_per_batch,
)

__all__ = ["Loop", "LoopDependency", "Template"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """An action that a lane repeats for every batch.

    Attributes:
        op: a name in `OPS`.
        stage: stage number.
        unit: micro-batch within the batch; 0 for batch ops.
        offset: turn b of the lane does batch ``b + offset``.
        peer: stage at the other end of the edge, for ops that name one.
        version_lag: of batch b it uses weight version ``max(0, b - version_lag)``; below 0 for a version that is
            predicted. None: it names no version.
        track: the lane's tracks are taken in any order against each other, and each in its own order; the first one,
            0, goes before the next if both are ready. None: the action has its place in the lane.
    """

    op: str
    stage: int = 0
    unit: int = 0
    offset: int = 0
    peer: int | None = None
    version_lag: int | None = None
    track: int | None = None

    @property
    def key(self) -> OpKey:
        return (self.stage, self.op)

    @property
    def text(self) -> str:
        """``0F``, ``0SENDX_F:3``: the key of progress counters."""
        peer = "" if self.peer is None else f":{self.peer}"
        return f"{self.stage}{self.op}{peer}"

    def version(self, batch: int) -> int | None:
        """The weight version that it uses in a batch; None: it names none."""
        return None if self.version_lag is None else max(0, batch - self.version_lag)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDependency:
    """Template `dst` in turn t waits for `src` in turn ``t - turns``; `edge` is None for the lane's own order."""

    src: int
    dst: int
    turns: int
    edge: Edge | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A pipeline in steady state.

    Attributes:
        lanes: resource name -> templates of one batch, in execution order.
        source: the op that takes the batches; the loop ends when it finds no more.
        sink: the op whose last unit ends a batch's step.
        edges, stages, resources, semantics: as in `Program`.
        in_flight: lane with tracks -> most forwards whose backwards are not done.
        templates: (lane, template), lane after lane; a template's number is its position here.
    """

    lanes: Mapping[str, tuple[Template, ...]]
    source: OpKey
    sink: OpKey
    edges: tuple[Edge, ...] = ()
    stages: tuple[Stage, ...] = ()
    resources: tuple[Resource, ...] = ()
    semantics: Semantics = "sync"
    in_flight: Mapping[str, int] = field(default_factory=dict)
    templates: tuple[tuple[str, Template], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        templates = tuple((lane, template) for lane, templates in self.lanes.items() for template in templates)
        object.__setattr__(self, "templates", templates)

    def units_per_batch(self, key: OpKey, peer: int | None = None) -> int:
        """Units of (stage, op) per batch; as in `Program`."""
        return units_per_batch(unit_counts(self.stages), key, peer)

    def resource(self, lane: str) -> Resource:
        """The lane's resource; a lane without one is a cpu lane."""
        return next((resource for resource in self.resources if resource.name == lane), Resource(name=lane))

    def ramp(self) -> int:
        """Batches that show everything a loop does: the start, and the steady state until every version is dropped.

        From turn ``max(version_lag - offset)`` on, the next turn is the same with all batches and versions one higher.
        """
        offsets = [template.offset for _, template in self.templates]
        lags = [abs(template.version_lag or 0) for _, template in self.templates]
        return 2 * (max(offsets, default=0) + max(lags, default=0) + 1)

    def first_turn(self) -> int:
        """The earliest turn in which some template has a batch >= 0."""
        return -max((template.offset for _, template in self.templates), default=0)

    def unroll(self, num_batches: int) -> Program:
        """The program of batches 0 … num_batches - 1, ramps included.

        Raises:
            ScheduleError: num_batches is negative.
        """
        if num_batches < 0:
            raise ScheduleError(f"expected a number of batches of at least 0, got {num_batches}")
        return Program(
            lanes={lane: self._unroll_lane(templates, num_batches) for lane, templates in self.lanes.items()},
            edges=self.edges,
            stages=self.stages,
            resources=self.resources,
            semantics=self.semantics,
        )

    def _unroll_lane(self, templates: tuple[Template, ...], num_batches: int) -> tuple[Action, ...]:
        last_turn = num_batches - min((template.offset for template in templates), default=0)
        return tuple(
            Action(
                stage=t.stage,
                op=t.op,
                index=(turn + t.offset) * self.units_per_batch(t.key, t.peer) + t.unit,
                peer=t.peer,
                version=t.version(turn + t.offset),
            )
            for turn in range(self.first_turn(), last_turn)
            for t in templates
            if 0 <= turn + t.offset < num_batches
        )

    def dependencies(self) -> tuple[LoopDependency, ...]:
        """Every dependency between templates, edges resolved to units, the order inside each lane included.

        Hazards without a constant delay are left out, since only the plan knows them.

        Raises:
            ScheduleError: an edge names an op that no lane performs.
        """
        found = self._lane_order()
        for edge in self.edges:
            if edge.delay is not None:
                for src, dst in self.connections(edge):
                    turns = edge.delay + self.templates[src][1].offset - self.templates[dst][1].offset
                    found.append(LoopDependency(src=src, dst=dst, turns=turns, edge=edge))
        return tuple(found)

    def _performers(self) -> Mapping[tuple[OpKey, int], list[int]]:
        """((stage, op), unit) -> numbers of the templates that perform or provide it: one per peer of the stage."""
        table: dict[tuple[OpKey, int], list[int]] = {}
        for number, (_, template) in enumerate(self.templates):
            for op in (template.op, *OPS[template.op].provides):
                table.setdefault(((template.stage, op), template.unit), []).append(number)
        return table

    def _lane_order(self) -> list[LoopDependency]:
        order: list[LoopDependency] = []
        first = 0
        for templates in self.lanes.values():
            numbers = range(first, first + len(templates))
            order += [LoopDependency(src=a, dst=a + 1, turns=0, edge=None) for a in numbers[:-1]]
            if templates:
                order.append(LoopDependency(src=numbers[-1], dst=first, turns=1, edge=None))
            first += len(templates)
        return order

    def connections(self, edge: Edge) -> list[tuple[int, int]]:
        """(src, dst) numbers of all templates the edge connects.

        Raises:
            ScheduleError: no lane performs one of them.
        """
        performers = self._performers()
        units, src_units = self.units_per_batch(edge.dst_key), self.units_per_batch(edge.src_key)
        found: list[tuple[int, int]] = []
        for unit in range(units):
            for src_unit in edge.source_units(unit, units, src_units):
                ends = ((edge.src_key, src_unit), (edge.dst_key, unit))
                for key, number in ends:
                    if (key, number) not in performers:
                        raise ScheduleError(f"edge {edge.text}: no lane performs {key[0]}{key[1]}, unit {number}")
                for src, dst in itertools.product(*(performers[end] for end in ends)):
                    if src != dst or edge.delay:  # a full backward is both I and W, and does not wait for itself
                        found.append((src, dst))
        return found
