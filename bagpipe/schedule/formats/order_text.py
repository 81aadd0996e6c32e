"""Orders that lanes chose, as text: one line per batch, replica and pipeline rank, to be repeated by another job.

    # bagpipe orders 1: stages 2, microbatches 2, replicas 1, model 0f3a…       what the job must have in common
    batch 0 replica 0 rank 0: 0F0,0F1,0B0,0B1                                   PyTorch's cells
    batch 0 replica 0 rank 1: 1F0,1B0,1F1,1B1

A line stands in memory as its tracks, one byte per action: 1 for a forward, 0 for a backward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, in_flight
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

__all__ = ["OrderKey", "OrderShape", "Orders", "order_line", "orders_of_text", "recorded_program"]

#: (batch, replica, pipeline rank).
OrderKey = tuple[int, int, int]
#: Key -> tracks in the order taken, a byte per action.
Orders = Mapping[OrderKey, bytes]

_OPS = "BF"
_NUMBER = r"(0|[1-9]\d{0,11})"
_HEADER_END = re.compile(rf"replicas {_NUMBER}, model ([0-9a-f]+)$", re.ASCII)
_LINE = re.compile(rf"batch {_NUMBER} replica {_NUMBER} rank {_NUMBER}: (\S+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderShape:
    """Shape of recorded orders, which the job that repeats them must have too.

    Attributes:
        graph: the stages, one per pipeline rank.
        replicas: replicas of the pipeline.
        model: a hash of the model's stages.
        limits: most micro-batches in flight, per pipeline rank; not in the text.
    """

    graph: StageGraph
    replicas: int
    model: str
    limits: tuple[int, ...]

    @property
    def header(self) -> str:
        """The first line of the text."""
        return (
            f"# bagpipe orders 1: stages {self.graph.num_stages}, microbatches {self.graph.microbatches}, "
            f"replicas {self.replicas}, model {self.model}"
        )


def order_line(key: OrderKey, tracks: Sequence[int]) -> str:
    """The line of a batch on a rank."""
    batch, replica, rank = key
    return f"batch {batch} replica {replica} rank {rank}: {','.join(a.text for a in _row(rank, tracks))}"


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
    found = _HEADER_END.search(text.partition("\n")[0])
    replicas, model = (int(found[1]), found[2]) if found else (1, "")
    orders = orders_of_text(text, OrderShape(graph=graph, replicas=replicas, model=model, limits=limits))
    if (batch, replica, 0) not in orders:
        raise ScheduleError(f"there is no batch {batch} of replica {replica}")
    ranks = range(graph.num_stages)
    return dense_program(graph, [_row(rank, orders[batch, replica, rank]) for rank in ranks])


def _parsed(line: str, shape: OrderShape) -> tuple[OrderKey, bytes]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ScheduleError(f"expected 'batch N replica N rank N: 0F0,0B0,…', got {line[:80]!r}")
    batch, replica, rank = (int(match[group]) for group in (1, 2, 3))
    if replica >= shape.replicas or rank >= shape.graph.num_stages:
        raise ScheduleError(f"there is no rank {rank} of replica {replica}")
    counts, tracks = [0, 0], bytearray()
    for cell in match[4].split(","):
        expected = [f"{rank}{op}{count}" for op, count in zip(_OPS, counts, strict=True)]
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
    ranks = range(shape.graph.num_stages)
    for batch, replica in dict.fromkeys((batch, replica) for batch, replica, _ in orders):
        missing = [f"replica {r} rank {k}" for r in range(shape.replicas) for k in ranks if (batch, r, k) not in orders]
        if missing:
            raise ScheduleError(f"batch {batch} has no order of {missing[0]}")
        rows = tuple(orders[batch, replica, rank] for rank in ranks)
        if rows in seen:
            continue
        seen.add(rows)
        actions = [_row(rank, row) for rank, row in zip(ranks, rows, strict=True)]
        try:
            check(dense_program(shape.graph, actions))
        except ScheduleError as error:
            raise ScheduleError(f"batch {batch}: {error}") from None
        for rank, (row, most) in enumerate(zip(actions, shape.limits, strict=True)):
            if in_flight(row) > most:
                raise ScheduleError(
                    f"batch {batch} has {in_flight(row)} micro-batches in flight on rank {rank}, where the job has at "
                    f"most {most}"
                )


def _row(rank: int, tracks: Sequence[int]) -> tuple[Action, ...]:
    counts, row = [0, 0], []
    for track in tracks:
        row.append(Action(rank, _OPS[track], counts[track]))
        counts[track] += 1
    return tuple(row)
