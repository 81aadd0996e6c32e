"""`StageGraph`: the dense part of a model as a DAG of stages, and the dependencies that follow from it.

    StageGraph ──builder──> rows of F, B, I, W per rank ──dense_program──> Program
                            templates per rank          ──dense_loop─────> Loop

    F(s, m) <- F(p, m') for every producer p     I(s, m) <- F(s, m) and I(c, m') for every consumer c     W <- I
    (m' whose examples overlap those of m; a full backward B is both I and W)

Micro-batch m of a stage with M of them is the share [m / M, (m + 1) / M) of the batch, so stages can differ in M.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Program, Resource, Semantics, Stage

__all__ = ["StageGraph", "chain", "dense_edges", "dense_loop", "dense_program", "parse_stage_graph"]

#: Limit for stages: a larger graph would exhaust memory.
MAX_STAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """Dense stages, numbered from 0, and the edges between them.

    Attributes:
        micro_per_batch: micro-batches per batch, by stage.
        edges: (producer, consumer) pairs, all different.
        names: per stage, for display; empty: no names.

    Raises:
        ScheduleError: no stage, a count below 1, a duplicate edge, an edge to an unknown stage, or a cycle.
    """

    micro_per_batch: tuple[int, ...]
    edges: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.micro_per_batch:
            raise ScheduleError("a stage graph needs at least one stage, got none")
        if min(self.micro_per_batch) < 1:
            raise ScheduleError(f"micro-batches per stage must be at least 1, got {list(self.micro_per_batch)}")
        if self.names and len(self.names) != self.num_stages:
            raise ScheduleError(f"expected {self.num_stages} stage names or none, got {len(self.names)}")
        seen: set[tuple[int, int]] = set()
        for src, dst in self.edges:
            if not (0 <= src < self.num_stages and 0 <= dst < self.num_stages):
                raise ScheduleError(f"edge {src}-{dst} names a stage that is not among 0 to {self.num_stages - 1}")
            if (src, dst) in seen:
                raise ScheduleError(f"edge {src}-{dst} appears twice")
            seen.add((src, dst))
        self.order  # noqa: B018  (raises for a cycle)

    @property
    def num_stages(self) -> int:
        return len(self.micro_per_batch)

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of all stages.

        Raises:
            ScheduleError: stages differ.
        """
        if len(set(self.micro_per_batch)) > 1:
            raise ScheduleError(f"expected one number of micro-batches for all stages, got {self.micro_per_batch}")
        return self.micro_per_batch[0]

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that feed it, ascending."""
        return self._neighbours((dst, src) for src, dst in self.edges)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages it feeds, ascending."""
        return self._neighbours(self.edges)

    def _neighbours(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.num_stages)]
        for stage, other in pairs:
            found[stage].append(other)
        return tuple(tuple(sorted(others)) for others in found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order; of the stages that are ready, the smallest number comes first.

        Raises:
            ScheduleError: there is none; the message names the cycle.
        """
        missing = [len(producers) for producers in self.producers]
        ready = [stage for stage, count in enumerate(missing) if not count]
        order: list[int] = []
        while ready:
            order.append(heapq.heappop(ready))
            for consumer in self.consumers[order[-1]]:
                missing[consumer] -= 1
                if not missing[consumer]:
                    heapq.heappush(ready, consumer)
        if len(order) < self.num_stages:
            left = {stage for stage, count in enumerate(missing) if count}
            raise ScheduleError(f"the stage graph has a cycle: {self._spell_cycle(left)}")
        return tuple(order)

    def _spell_cycle(self, left: Collection[int]) -> str:
        path = [min(left)]
        while path[-1] not in path[:-1]:
            path.append(next(p for p in self.producers[path[-1]] if p in left))
        cycle = path[path.index(path[-1]) :][::-1]
        return " -> ".join(map(str, cycle))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Per stage, the number of stages on the longest path to the end, including itself."""
        depths = [1] * self.num_stages
        for stage in reversed(self.order):
            depths[stage] = 1 + max((depths[c] for c in self.consumers[stage]), default=0)
        return tuple(depths)


def chain(num_stages: int, microbatches: int) -> StageGraph:
    """Stages 0 -> 1 -> … with equal micro-batches.

    Raises:
        ScheduleError: either number is below 1, or there are too many stages.
    """
    if not 1 <= num_stages <= MAX_STAGES:
        raise ScheduleError(f"stages must be 1 to {MAX_STAGES}, got {num_stages}")
    return StageGraph(
        micro_per_batch=(microbatches,) * num_stages, edges=tuple((s, s + 1) for s in range(num_stages - 1))
    )


def parse_stage_graph(num_stages: int, microbatches: str, edges: str) -> StageGraph:
    """The stage graph of the command line's options.

    Args:
        num_stages: stages.
        microbatches: ``8``, or one number per stage: ``32,16,8``.
        edges: ``0-2,1-2``; empty: a chain.

    Raises:
        ScheduleError: a text is malformed, or the graph is invalid.
    """
    counts = [_number("microbatches", "8 or 32,16,8", part, microbatches) for part in microbatches.split(",")]
    graph = chain(num_stages, counts[0])
    if len(counts) not in (1, num_stages):
        raise ScheduleError(f"microbatches: expected one number or {num_stages}, one per stage, got {len(counts)}")
    pairs = [pair.partition("-") for pair in edges.split(",")] if edges else []
    return StageGraph(
        micro_per_batch=tuple(counts) if len(counts) > 1 else graph.micro_per_batch,
        edges=tuple(
            (_number("edges", "0-1,1-2", src, edges), _number("edges", "0-1,1-2", dst, edges)) for src, _, dst in pairs
        )
        or graph.edges,
    )


def _number(option: str, example: str, text: str, whole: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ScheduleError(f"{option}: expected numbers such as {example}, got {whole!r}")
    return int(text)


def dense_edges(graph: StageGraph, *, split: Sequence[int] = ()) -> tuple[Edge, ...]:
    """Dependencies of F, I and W; B counts as I and W.

    Args:
        graph: the stages.
        split: stages that have W actions of their own.
    """
    forward = [Edge(src="F", dst="F", src_stage=p, dst_stage=c) for p, c in graph.edges]
    backward = [Edge(src="I", dst="I", src_stage=c, dst_stage=p) for p, c in graph.edges]
    turn = [Edge(src="F", dst="I", src_stage=s, dst_stage=s) for s in range(graph.num_stages)]
    halves = [Edge(src="I", dst="W", src_stage=s, dst_stage=s) for s in split]
    return (*forward, *backward, *turn, *halves)


def dense_loop(
    graph: StageGraph, rows: Sequence[Sequence[Template]], *, semantics: Semantics, edges: Sequence[Edge] = ()
) -> Loop:
    """The steady state of an asynchronous schedule: row r becomes lane ``rank<r>``.

    Args:
        graph: the stages.
        rows: per rank the actions of one turn; offsets say how many batches an action runs ahead of the turn.
        semantics: which weights the actions use.
        edges: dependencies besides those of `dense_edges`, such as those of the optimizer.
    """
    split = sorted({template.stage for row in rows for template in row if template.op == "W"})
    first = graph.order[0]
    predicts = any(template.key == (first, "PRED") for row in rows for template in row)
    return Loop(
        lanes={f"rank{number}": tuple(row) for number, row in enumerate(rows)},
        edges=(*dense_edges(graph, split=split), *edges),
        source=(first, "PRED" if predicts else "F"),
        sink=(first, "W" if first in split else "B"),
        stages=_stages(graph, graph.micro_per_batch),
        resources=_resources(len(rows)),
        semantics=semantics,
    )


def dense_program(graph: StageGraph, rows: Sequence[Sequence[Action]], *, num_pipes: int = 1) -> Program:
    """The program of one batch: row r becomes lane ``rank<r>``.

    Args:
        graph: the stages.
        rows: per rank, its F, B, I, W, REC and OVERLAP_F_B in order.
        num_pipes: pipes that share the micro-batches evenly; an index counts the micro-batches of its pipe.

    Raises:
        ScheduleError: a stage's micro-batches cannot be shared evenly.
    """
    uneven = [m for m in graph.micro_per_batch if m % num_pipes]
    if uneven:
        raise ScheduleError(f"micro-batches must be a multiple of {num_pipes}, the number of pipes, got {uneven[0]}")
    split = sorted({atom.stage for row in rows for action in row for atom in action.atoms if atom.op == "W"})
    return Program(
        lanes={f"rank{number}": tuple(row) for number, row in enumerate(rows)},
        edges=dense_edges(graph, split=split),
        stages=_stages(graph, [m // num_pipes for m in graph.micro_per_batch]),
        resources=_resources(len(rows)),
    )


def _stages(graph: StageGraph, micro_per_batch: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(
        Stage(number=s, name=graph.names[s] if graph.names else "", micro_per_batch=m)
        for s, m in enumerate(micro_per_batch)
    )


def _resources(num_ranks: int) -> tuple[Resource, ...]:
    return tuple(Resource(name=f"rank{number}", kind="gpu") for number in range(num_ranks))
