"""Compiles a checked loop into lane plans: every edge becomes one comparison of counters.

    Loop, handlers, hazards ──compile_loop──> LanePlan per lane: steps, each with its handler and requirements

An op finishes its actions in lane order, so "action of batch b is done" is ``done[op] >= b * actions + position``: one
comparison per requirement and action. The unit is the action, not the micro-batch: a schedule can run some backwards as
B and others as I and W, in any order. A position counts the op's actions of one batch, even if they are in two turns.
Requirements implied by the lane's own order or by an earlier step of the same turn are dropped.

Where a lane has tracks, the steps of a track and micro-batch are a unit: a forward and its sends, say. Its first step
has all requirements of the unit, those on other tracks of the lane and the limit of forwards in flight included. A unit
whose requirements are met can so be taken as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.pipeline.interpret import Handler, find_handler
from bagpipe.schedule.analysis.check import RUNNER_RULES, check_loop
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Hazards, Resource

__all__ = ["CompiledLoop", "LanePlan", "Requirement", "Step", "Unit", "compile_loop"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """Batch b needs ``(b - delay) * actions + position`` actions of op number `op`, if ``b >= delay``."""

    op: int
    delay: int
    actions: int
    position: int

    def covers(self, other: Requirement) -> bool:
        """Whether this requirement implies `other`."""
        return self.op == other.op and (self.delay, -self.position) <= (other.delay, -other.position)


@dataclass(frozen=True, slots=True)
class _HazardRequirement:
    """Batch b needs ``source(b) * actions + position`` actions of op number `op`, if ``source(b) >= 0``."""

    name: str
    source: Callable[[int], int]
    op: int
    actions: int
    position: int


@dataclass(frozen=True, slots=True)
class Step:
    """One template of a lane, ready to run.

    Attributes:
        text: stage and op, ``0X_FETCH``, and the peer if there is one.
        op: op number.
        units, unit, offset: index of turn t is ``(t + offset) * units + unit``.
        handler: called with the index.
        requirements, hazards: actions that must be done first.
        is_source: the step takes batches from outside.
        ends_batch: the step is the last unit of the sink.
    """

    text: str
    op: int
    units: int
    unit: int
    offset: int
    handler: Handler
    requirements: tuple[Requirement, ...]
    hazards: tuple[_HazardRequirement, ...]
    is_source: bool
    ends_batch: bool


#: The steps of a track and micro-batch.
Unit = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Steps of one lane, in order; those from `first_free` to `end_free` are its tracks, by priority, unit by unit."""

    resource: Resource
    steps: tuple[Step, ...]
    tracks: tuple[tuple[Unit, ...], ...] = ()
    first_free: int = 0
    end_free: int = 0


@dataclass(frozen=True, slots=True)
class CompiledLoop:
    """All lane plans; op number -> text and actions per batch; the first turn (ramps begin before 0)."""

    lanes: tuple[LanePlan, ...]
    op_names: tuple[str, ...]
    op_actions: tuple[int, ...]
    first_turn: int
    sink: int


def compile_loop(loop: Loop, handlers: Mapping[str, Handler], hazards: Hazards) -> CompiledLoop:
    """Check the loop and resolve all names in it.

    Raises:
        ScheduleError: the loop is invalid, a handler or hazard is missing, or one is given that is not in the loop.
    """
    check_loop(loop, RUNNER_RULES)
    _check_names(loop, handlers, hazards)
    compiler = _Compiler(loop)
    steps: dict[str, list[Step]] = {lane: [] for lane in loop.lanes}
    needs = compiler.track_requirements()
    for number, (lane, template) in enumerate(loop.templates):
        steps[lane].append(
            Step(
                text=template.text,
                op=compiler.op(number),
                units=loop.units_per_batch(template.key, template.peer),
                unit=template.unit,
                offset=template.offset,
                handler=find_handler(handlers, template.text, template.op),
                requirements=compiler.requirements(number, steps[lane])
                if template.track is None
                else needs.get(number, ()),
                hazards=compiler.hazards(number, hazards),
                is_source=template.key == loop.source,
                ends_batch=template.key == loop.sink and compiler.is_last(number),
            )
        )
    return CompiledLoop(
        lanes=tuple(_lane_plan(loop, lane, tuple(own)) for lane, own in steps.items()),
        op_names=tuple(compiler.actions),
        op_actions=tuple(compiler.actions.values()),
        first_turn=loop.first_turn(),
        sink=list(compiler.actions).index(f"{loop.sink[0]}{loop.sink[1]}"),
    )


def _lane_plan(loop: Loop, lane: str, steps: tuple[Step, ...]) -> LanePlan:
    free = [(place, t) for place, t in enumerate(loop.lanes[lane]) if t.track is not None]
    if not free:
        return LanePlan(loop.resource(lane), steps)
    tracks: dict[int, dict[int, list[Step]]] = {}
    for place, template in free:
        tracks.setdefault(template.track or 0, {}).setdefault(template.unit, []).append(steps[place])
    units = tuple(tuple(tuple(unit) for unit in tracks[track].values()) for track in sorted(tracks))
    return LanePlan(loop.resource(lane), steps, units, free[0][0], free[-1][0] + 1)


def _check_names(loop: Loop, handlers: Mapping[str, Handler], hazards: Hazards) -> None:
    known = {name for _, template in loop.templates for name in (template.op, template.text)}
    for name in handlers:
        if name not in known:
            raise ScheduleError(f"handler {name!r} is for no op of the loop; its ops: {', '.join(sorted(known))}")
    wanted = {edge.hazard for edge in loop.edges if edge.kind == "hazard"}
    if wanted != set(hazards):
        raise ScheduleError(f"expected hazards {sorted(wanted)}, got {sorted(hazards)}")


class _Compiler:
    """Resolves the names of a loop.

    Attributes:
        actions: op text -> actions per batch, in the order of the op numbers.
    """

    def __init__(self, loop: Loop) -> None:
        self._templates = loop.templates
        self._in_flight = loop.in_flight
        self.actions = Counter(template.text for _, template in loop.templates)
        self._numbers = {text: number for number, text in enumerate(self.actions)}
        self._positions = [0] * len(loop.templates)
        seen: Counter[str] = Counter()
        # Those with a higher offset do a batch in an earlier turn (the rule "offsets": none overtakes another batch).
        for number in sorted(range(len(loop.templates)), key=lambda number: -loop.templates[number][1].offset):
            text = loop.templates[number][1].text
            seen[text] += 1
            self._positions[number] = seen[text]
        self._into: dict[int, list[tuple[Edge, int]]] = {}
        for edge in loop.edges:
            for src, dst in loop.connections(edge):
                self._into.setdefault(dst, []).append((edge, src))

    def op(self, number: int) -> int:
        """Op number of template `number`."""
        return self._numbers[self._templates[number][1].text]

    def is_last(self, number: int) -> bool:
        """Whether template `number` is the last of its op in a batch."""
        return self._need(number)[0] == self._positions[number]

    def requirements(self, number: int, earlier: list[Step]) -> tuple[Requirement, ...]:
        """Requirements of template `number` that neither lane order nor the `earlier` steps of the lane imply."""
        lane, template = self._templates[number]
        found: list[Requirement] = []
        for edge, src in self._into.get(number, ()):
            # Dependencies inside a lane hold by lane order: the loop has been checked for deadlock.
            if edge.kind != "hazard" and self._templates[src][0] != lane:
                assert edge.delay is not None, "only a hazard has no delay"
                found.append(Requirement(self.op(src), edge.delay, *self._need(src)))
        return _least(found, [r for step in earlier if step.offset == template.offset for r in step.requirements])

    def track_requirements(self) -> Mapping[int, tuple[Requirement, ...]]:
        """First template of a unit of a track -> the requirements of the whole unit."""
        units: dict[tuple[str, int, int], list[int]] = {}
        for number, (lane, template) in enumerate(self._templates):
            if template.track is not None:
                units.setdefault((lane, template.track, template.unit), []).append(number)
        found: dict[int, tuple[Requirement, ...]] = {}
        for (lane, track, _), numbers in units.items():
            needs = [r for number in numbers for r in self._of_track(number)]
            ahead = self._in_flight[lane]
            for number in numbers:
                if OPS[self._templates[number][1].op].role == "forward":
                    needs += self._limit(units, lane, self._templates[number][1].unit - ahead)
            before = [found[first[0]] for key, first in units.items() if key[:2] == (lane, track) and first[0] in found]
            found[numbers[0]] = _least(needs, [r for earlier in before for r in earlier])
        return found

    def _of_track(self, number: int) -> Iterator[Requirement]:
        """What a template of a track waits for in other lanes and in other tracks of its own lane."""
        lane, template = self._templates[number]
        for edge, src in self._into.get(number, ()):
            source_lane, source = self._templates[src]
            if edge.kind == "hazard":
                raise ScheduleError(f"{template.text} of a track waits for hazard {edge.hazard}")
            if source_lane != lane or source.track not in (None, template.track):
                yield Requirement(self.op(src), edge.delay or 0, *self._need(src))

    def _limit(self, units: Mapping[tuple[str, int, int], list[int]], lane: str, unit: int) -> Iterator[Requirement]:
        """The forward that is the limit ahead of a micro-batch waits for its backward."""
        for (owner, _, own_unit), numbers in units.items():
            if (owner, own_unit) == (lane, unit):
                for number in numbers:
                    if OPS[self._templates[number][1].op].role in ("backward", "weight_grad"):
                        yield Requirement(self.op(number), 0, *self._need(number))

    def hazards(self, number: int, hazards: Hazards) -> tuple[_HazardRequirement, ...]:
        """One requirement per hazard and source op, on all source units that overlap the template's own unit."""
        found: dict[tuple[str, int], _HazardRequirement] = {}
        for edge, src in self._into.get(number, ()):
            if edge.kind == "hazard":
                op, (actions, position) = self.op(src), self._need(src)
                known = found.get((edge.hazard, op))
                if known is None or known.position < position:
                    requirement = _HazardRequirement(edge.hazard, hazards[edge.hazard], op, actions, position)
                    found[edge.hazard, op] = requirement
        return tuple(found.values())

    def _need(self, number: int) -> tuple[int, int]:
        return self.actions[self._templates[number][1].text], self._positions[number]


def _least(found: Iterable[Requirement], met: Sequence[Requirement]) -> tuple[Requirement, ...]:
    """The requirements that neither those that are met nor others of them imply."""
    kept: list[Requirement] = []
    for requirement in found:
        if not any(other.covers(requirement) for other in (*met, *kept)):
            kept = [other for other in kept if not requirement.covers(other)] + [requirement]
    return tuple(kept)
