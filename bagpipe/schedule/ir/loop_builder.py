"""`LoopBuilder`: composes a `Loop` from the lanes and edges that its parts contribute.

    part 1 ──lane, edge, provide(point)──┐
    part 2 ──insert(after=point) ────────┼─> build() ──> Composition: Loop, and the operations at each point
    part 3 ──edge(point, op) ────────────┘

Parts do not name each other's operations. They connect at *points*: one part provides a point (`ROWS_READY` is
X_INSERT), another one refers to it (the first forward waits for `ROWS_READY`). A later part can provide a point
anew and so put itself in between: with several ranks `ROWS_READY` is X_PULL. `build` resolves the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, EdgeKind, OpKey, Resource, ResourceKind, Stage

__all__ = ["READ", "Composition", "LoopBuilder", "Operation", "Point", "sort_lanes"]

#: The operation that takes batches from outside.
READ: OpKey = (0, "X_READ")


class Point(Enum):
    """A moment in the life of a batch, whatever operation stands for it."""

    #: The batch and its plan are here.
    READ = "read"
    #: The rows of the batch can be looked up.
    ROWS_READY = "rows ready"
    #: The operation that looks the rows up: the first forward, or the embedding stage.
    LOOKUP = "lookup"
    #: The forwards of this process, by stage; their actions count micro-batches.
    FORWARD = "forward"
    #: The gradients of the batch's rows are complete.
    GRADIENTS = "gradients"
    #: The gradients of this process's stages are summed over the ranks, before all stages agree on the batch.
    SUMMED = "summed"
    #: The dense optimizer steps of this process.
    STEP = "step"
    #: The new weights are on this rank: the steps, or the gathers behind them if their results are divided.
    WEIGHTS = "weights"
    #: The row updates.
    UPDATE = "update"
    #: The rows that left the cache are in the store, on all ranks.
    STORED = "stored"


#: An operation of stage 0 by name, an operation of a stage, or whatever a part provides for a point.
Operation = str | OpKey | Point


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """An edge between operations that are not resolved yet; the other fields are those of `Edge`."""

    src: Operation
    dst: Operation
    delay: int | None = 0
    kind: EdgeKind = "data"
    hazard: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A loop, and where its points are.

    Attributes:
        loop: the loop.
        points: operations by point; a point that no part provides is missing.
    """

    loop: Loop
    points: Mapping[Point, tuple[OpKey, ...]]

    def operations(self, point: Point) -> tuple[OpKey, ...]:
        """The operations at a point.

        Raises:
            ScheduleError: no part provides it.
        """
        if point not in self.points:
            raise ScheduleError(f"no part of the loop provides the point {point.value!r}")
        return self.points[point]


#: Lanes from the first one to touch a batch to the last one; a name stands for all lanes that begin with it.
_LANE_ORDER: tuple[tuple[str, ResourceKind], ...] = (
    ("data", "cpu"),
    ("net-in", "nic"),
    ("copy", "copy"),
    ("pull", "copy"),
    ("recv", "nic"),
    ("compute", "gpu"),
    ("reduce", "copy"),
    ("push", "copy"),
    ("net-out", "nic"),
    ("ack", "nic"),
)


class LoopBuilder:
    """Collects what parts contribute; see the module. Parts call it in the order in which they are listed.

    Args:
        read_ahead: batches read and not yet trained, at most. Reading waits for the last action of every compute lane.
    """

    def __init__(self, *, read_ahead: int) -> None:
        self.read_ahead = read_ahead
        self._lanes: dict[str, list[Template]] = {}
        self._inserts: list[tuple[Template, Point]] = []
        self._appended: list[tuple[Template, int]] = []
        self._links: list[_Link] = []
        self._edges: list[Edge] = []
        self._stages: list[Stage] = []
        self._in_flight: dict[str, int] = {}
        self._points: dict[Point, tuple[OpKey, ...]] = {}

    def lane(self, name: str, *templates: Template | str) -> None:
        """Append actions to a lane. Lanes are known by their names; see `_LANE_ORDER`."""
        self._lanes.setdefault(name, []).extend(
            Template(op=template) if isinstance(template, str) else template for template in templates
        )

    def has_lane(self, name: str) -> bool:
        """Whether a part listed before has such a lane."""
        return name in self._lanes

    def in_flight(self, lane: str, most: int) -> None:
        """Say how many forwards of a lane with tracks may lack their backwards."""
        self._in_flight[lane] = most

    def insert(self, op: str, *, after: Point) -> None:
        """Put an action of stage 0 right behind the operations of a point, in their lane."""
        self._inserts.append((Template(op=op), after))

    def append(self, op: str, *, lookups_ahead: int = 0) -> None:
        """Put an action of stage 0 at the end of the lane of `Point.LOOKUP`, behind what other parts put there.

        Args:
            op: the action.
            lookups_ahead: its batch b comes after the lookup of batch b + lookups_ahead, and before the next one. Where
                the lookup does not run that far ahead of the lane's turn, the action follows it right behind.
        """
        self._appended.append((Template(op=op), lookups_ahead))

    def stage(self, *stages: Stage) -> None:
        """Add stages, for their numbers of micro-batches."""
        self._stages.extend(stages)

    def provide(self, point: Point, *operations: str | OpKey) -> None:
        """Say which operations stand for a point from now on."""
        self._points[point] = tuple(_key(operation) for operation in operations)

    def so_far(self, point: Point) -> OpKey:
        """The operation that stands for a point now: for a part that is about to put itself behind it.

        Raises:
            ScheduleError: no part listed before provides it, or several operations stand for it.
        """
        operations = self._at(point)
        if len(operations) != 1:
            raise ScheduleError(f"point {point.value!r}: expected one operation, got {list(operations)}")
        return operations[0]

    def edge(self, src: Operation, dst: Operation, *, delay: int = 0) -> None:
        """`dst` of batch b waits for `src` of batch ``b - delay``."""
        self._links.append(_Link(src=src, dst=dst, delay=delay))

    def capacity(self, src: Operation, dst: Operation, buffers: int) -> None:
        """`src` frees one of so many buffers that `dst` fills."""
        self._links.append(_Link(src=src, dst=dst, delay=buffers, kind="capacity"))

    def hazard(self, src: Operation, dst: Operation, name: str, delay: int | None = None) -> None:
        """`dst` waits for `src` of the batch that the plan names; `delay` stands for it in checks and simulation."""
        self._links.append(_Link(src=src, dst=dst, delay=delay, kind="hazard", hazard=name))

    def resolved(self, edges: Iterable[Edge]) -> None:
        """Add edges whose operations are known already."""
        self._edges.extend(edges)

    def build(self) -> Composition:
        """The loop.

        Raises:
            ScheduleError: a point is referred to that no part provides.
        """
        lanes = {lane: list(templates) for lane, templates in self._lanes.items()}
        for template, point in self._inserts:
            for key in self._at(point):
                lane, position = _last(lanes, key)
                lanes[lane].insert(position + 1, template)
        names = sort_lanes(lanes)
        main, place = _last(lanes, self._at(Point.LOOKUP)[0])
        for template, lookups_ahead in self._appended:
            offset = lanes[main][place].offset - lookups_ahead
            lanes[main].insert(len(lanes[main]) if offset >= 0 else place + 1, replace(template, offset=offset))
        ends = [_end(lanes[main]), *(_end(lanes[n]) for n in names if n.startswith("compute") and n != main)]
        loop = Loop(
            lanes={name: tuple(lanes[name]) for name in names},
            edges=(
                *(edge for link in self._links for edge in self._resolve(link)),
                *self._edges,
                *(_edge(_Link(src=key, dst=READ, delay=self.read_ahead, kind="capacity"), key, READ) for key in ends),
            ),
            source=READ,
            sink=ends[0],
            stages=tuple(self._stages),
            resources=tuple(Resource(name=name, kind=_LANE_ORDER[_position(name)[0]][1]) for name in names),
            in_flight=dict(self._in_flight),
        )
        return Composition(loop=loop, points=dict(self._points))

    def _at(self, operation: Operation) -> tuple[OpKey, ...]:
        if not isinstance(operation, Point):
            return (_key(operation),)
        if operation not in self._points:
            raise ScheduleError(f"no part of the loop provides the point {operation.value!r}")
        return self._points[operation]

    def _resolve(self, link: _Link) -> Iterable[Edge]:
        for src in self._at(link.src):
            for dst in self._at(link.dst):
                yield _edge(link, src, dst)


def sort_lanes(names: Iterable[str]) -> tuple[str, ...]:
    """Lane names from the first lane to touch a batch to the last one, each once.

    Raises:
        ScheduleError: there is no such lane.
    """
    return tuple(sorted(set(names), key=_position))


def _key(operation: str | OpKey) -> OpKey:
    return (0, operation) if isinstance(operation, str) else operation


def _edge(link: _Link, src: OpKey, dst: OpKey) -> Edge:
    return Edge(
        src=src[1],
        dst=dst[1],
        src_stage=src[0],
        dst_stage=dst[0],
        delay=link.delay,
        kind=link.kind,
        hazard=link.hazard,
    )


def _end(templates: list[Template]) -> OpKey:
    """The operation that ends a batch in a lane."""
    return max(enumerate(templates), key=lambda item: (-item[1].offset, item[0]))[1].key


def _last(lanes: Mapping[str, list[Template]], key: OpKey) -> tuple[str, int]:
    """Lane and position of an operation's last action of a batch."""
    positions = [
        (lane, position)
        for lane, templates in lanes.items()
        for position, template in enumerate(templates)
        if template.key == key
    ]
    if not positions:
        raise ScheduleError(f"no lane performs {key[0]}{key[1]}")
    return positions[-1]


def _position(lane: str) -> tuple[int, int]:
    """Position of a lane among the lanes, for sorting."""
    for position, (name, _) in enumerate(_LANE_ORDER):
        number = lane.removeprefix(name)
        if lane.startswith(name) and (not number or number.isdecimal()):
            return position, int(number) if number else 1 << 30  # the whole model behind the stages
    raise ScheduleError(f"no lane {lane!r}; expected one of {', '.join(name for name, _ in _LANE_ORDER)}")
