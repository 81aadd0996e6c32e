"""Orders that lanes chose, as text: one line per batch, replica and pipeline rank, to be repeated by another job.

    # bagpipe orders 1: stages 2, microbatches 2, replicas 1, model 0f3a…       what the job must have in common
    batch 0 replica 0 rank 0: 0F0,0F1,0B0,0B1                                   PyTorch's cells
    batch 0 replica 0 rank 1: 1F0,1B0,1F1,1B1

With ``stages 2, ranks 2,1`` a stage has several pipeline ranks, which compute their parts of its micro-batches.
A line stands in memory as its tracks, one byte per action: 1 for a forward, 0 for a backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, in_flight
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program, Resource
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program
from bagpipe.schedule.lowering.replicas import replicate_stages

__all__ = ["OrderKey", "OrderShape", "Orders", "order_line", "orders_of_text", "recorded_program"]

#: (batch, replica, pipeline rank).
OrderKey = tuple[int, int, int]
#: Key -> tracks in the order taken, a byte per action.
Orders = Mapping[OrderKey, bytes]

_OPS = "BF"
_NUMBER = r"(0|[1-9]\d{0,11})"
_HEADER = re.compile(
    rf"# bagpipe orders 1: stages {_NUMBER}(?:, ranks ([1-9]\d{{0,3}}(?:,[1-9]\d{{0,3}})*))?, microbatches {_NUMBER}, "
    rf"replicas {_NUMBER}, model ([0-9a-f]+)",
    re.ASCII,
)
_LINE = re.compile(rf"batch {_NUMBER} replica {_NUMBER} rank {_NUMBER}: (\S+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderShape:
    """Shape of recorded orders, which the job that repeats them must have too.

    Attributes:
        graph: the stages.
        replicas: replicas of the pipeline.
        model: a hash of the model's stages.
        limits: most micro-batches in flight on a pipeline rank, by stage; not in the text.
        stage_replicas: pipeline ranks of each stage; empty: one each.
    """

    graph: StageGraph
    replicas: int
    model: str
    limits: tuple[int, ...]
    stage_replicas: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each pipeline rank."""
        return tuple(stage for stage, count in enumerate(self.counts) for _ in range(count))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of pipeline ranks of each stage."""
        return self.stage_replicas or (1,) * self.graph.num_stages

    @property
    def header(self) -> str:
        """The first line of the text."""
        ranks = f", ranks {','.join(map(str, self.stage_replicas))}" if self.stage_replicas else ""
        return (
            f"# bagpipe orders 1: stages {self.graph.num_stages}{ranks}, microbatches {self.graph.microbatches}, "
            f"replicas {self.replicas}, model {self.model}"
        )


def order_line(key: OrderKey, tracks: Sequence[int], shape: OrderShape) -> str:
    """The line of a batch on a rank."""
    batch, replica, rank = key
    return f"batch {batch} replica {replica} rank {rank}: {','.join(a.text for a in _row(shape.stages[rank], tracks))}"


def orders_of_text(text: str, shape: OrderShape) -> Orders:
    """The orders of a text, every batch checked.

    Raises:
        ScheduleError: the text is of another model, stages, micro-batches or replicas, a line is malformed, or the
            order of a batch is incomplete, deadlocks, or has more micro-batches in flight than the limits allow.
    """
    header, *lines = text.splitlines() or [""]
    if header != shape.header:
        raise ScheduleError(f"expected orders of this job, {shape.header!r}, got {header[:200]!r}")
    found: dict[OrderKey, bytes] = {}
    known: dict[bytes, bytes] = {}
    for number, line in enumerate(lines, start=2):
        try:
            key, tracks = _parsed(line, shape)
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
        if key in found:
            raise ScheduleError(f"line {number}: batch {key[0]} of rank {key[2]} comes twice")
        found[key] = known.setdefault(tracks, tracks)
    _check(found, shape)
    return found


def recorded_program(text: str, graph: StageGraph, limits: tuple[int, ...], *, batch: int, replica: int = 0) -> Program:
    """One batch of recorded orders, after a check of all of them.

    Args:
        text: of any model.
        graph, limits: see `OrderShape`.
        batch, replica: whose order.

    Raises:
        ScheduleError: see `orders_of_text`; or the text has no such batch or replica.
    """
    found = _HEADER.fullmatch(text.partition("\n")[0])
    ranks = tuple(map(int, found[2].split(","))) if found and found[2] else ()
    shape = OrderShape(
        graph=graph,
        replicas=int(found[4]) if found else 1,
        model=found[5] if found else "",
        limits=limits,
        stage_replicas=ranks if len(ranks) == graph.num_stages else (),
    )
    orders = orders_of_text(text, shape)
    if (batch, replica, 0) not in orders:
        raise ScheduleError(f"there is no batch {batch} of replica {replica}")
    return _program(shape, [orders[batch, replica, rank] for rank in range(len(shape.stages))])


def _parsed(line: str, shape: OrderShape) -> tuple[OrderKey, bytes]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ScheduleError(f"expected 'batch N replica N rank N: 0F0,0B0,…', got {line[:80]!r}")
    batch, replica, rank = (int(match[group]) for group in (1, 2, 3))
    if replica >= shape.replicas or rank >= len(shape.stages):
        raise ScheduleError(f"there is no rank {rank} of replica {replica}")
    counts, tracks = [0, 0], bytearray()
    stage = shape.stages[rank]
    for cell in match[4].split(","):
        expected = [f"{stage}{op}{count}" for op, count in zip(_OPS, counts, strict=True)]
        if cell not in expected or counts[expected.index(cell)] == shape.graph.microbatches:
            raise ScheduleError(f"expected {expected[1]} or {expected[0]}, got {cell[:20]}")
        track = expected.index(cell)
        counts[track] += 1
        tracks.append(track)
    if counts != [shape.graph.microbatches] * 2:
        raise ScheduleError(
            f"expected {shape.graph.microbatches} forwards and backwards, got {counts[1]} and {counts[0]}"
        )
    return (batch, replica, rank), bytes(tracks)


def _check(orders: Orders, shape: OrderShape) -> None:
    """Every batch of every replica, each different order once."""
    seen: set[tuple[bytes, ...]] = set()
    ranks = range(len(shape.stages))
    for batch, replica in dict.fromkeys((batch, replica) for batch, replica, _ in orders):
        missing = [f"replica {r} rank {k}" for r in range(shape.replicas) for k in ranks if (batch, r, k) not in orders]
        if missing:
            raise ScheduleError(f"batch {batch} has no order of {missing[0]}")
        rows = tuple(orders[batch, replica, rank] for rank in ranks)
        if rows in seen:
            continue
        seen.add(rows)
        try:
            program = _program(shape, rows)
            check(program)
        except ScheduleError as error:
            raise ScheduleError(f"batch {batch}: {error}") from None
        for rank, (row, stage) in enumerate(zip(program.lanes.values(), shape.stages, strict=True)):
            if in_flight(row) > shape.limits[stage]:
                raise ScheduleError(
                    f"batch {batch} has {in_flight(row)} micro-batches in flight on rank {rank}, where the job has at "
                    f"most {shape.limits[stage]}"
                )


def _program(shape: OrderShape, rows: Sequence[bytes]) -> Program:
    """One batch of a replica in which every pipeline rank has the order of its row."""
    firsts = [shape.stages.index(stage) for stage in range(shape.graph.num_stages)]
    dense = dense_program(shape.graph, [_row(stage, rows[rank]) for stage, rank in enumerate(firsts)])
    program = replicate_stages(dense, shape.counts)
    numbers = [actions[0].stage for actions in program.lanes.values()]
    lanes = {f"rank{rank}": _row(number, rows[rank]) for rank, number in enumerate(numbers)}
    return replace(program, lanes=lanes, resources=tuple(Resource(name=lane, kind="gpu") for lane in lanes))


def _row(stage: int, tracks: Sequence[int]) -> tuple[Action, ...]:
    counts, row = [0, 0], []
    for track in tracks:
        row.append(Action(stage, _OPS[track], counts[track]))
        counts[track] += 1
    return tuple(row)
