"""`DenseSchedule`: a schedule of dense stages by name. A builder registers itself; its file is all a schedule needs.

builders/<file>.py:  @register("1f1b", "…")          DENSE_SCHEDULES["1f1b"].build(graph, chunks) ──> Program
                     def one_f_one_b(graph, chunks) ──┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bagpipe.schedule.ir.errors import ScheduleError
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph

__all__ = ["DenseSchedule", "register", "registered"]

#: Of all stages together; more is a mistake, and a program of them would fill the memory.
MAX_MICROBATCHES = 1_000_000

#: (stages, stages per rank) -> program of one batch, compute actions only.
Builder = Callable[[StageGraph, int], Program]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSchedule:
    """One schedule.

    Attributes:
        name: as asked for.
        summary: one line.
        builder: makes the rows; raises ScheduleError for what it does not allow, saying what it would.
        chunks: stages per rank if the user does not say.
        fixed_chunks: it takes no other number.
        num_pipes: directions in which micro-batches travel; every rank then holds that many stages.
        linear: stages must be numbered so that every edge leads to a higher number; False: any order.
        ranks: ranks that it is made for, whatever the stages per rank; None: stages / chunks.
    """

    name: str
    summary: str
    builder: Builder
    chunks: int = 1
    fixed_chunks: bool = True
    num_pipes: int = 1
    linear: bool = True
    ranks: int | None = None

    def num_ranks(self, num_stages: int, chunks: int | None = None) -> int:
        """Ranks that hold `num_stages` stages.

        Raises:
            ScheduleError: the chunks are not allowed, or do not divide the stages.
        """
        per_rank = self.chunks_or_default(chunks)
        if num_stages < 1:
            raise ScheduleError(f"stages must be at least 1, got {num_stages}")
        if self.ranks is not None:
            return self.ranks
        if num_stages % per_rank:
            raise ScheduleError(f"{self.name}: stages must be a multiple of {per_rank} chunks, got {num_stages}")
        return num_stages // per_rank

    def chunks_or_default(self, chunks: int | None) -> int:
        """Stages per rank.

        Raises:
            ScheduleError: not allowed.
        """
        if chunks is None:
            return self.chunks
        if chunks < 1 or (self.fixed_chunks and chunks != self.chunks):
            allowed = str(self.chunks) if self.fixed_chunks else "at least 1"
            raise ScheduleError(f"{self.name}: chunks must be {allowed}, got {chunks}")
        return chunks

    def build(self, graph: StageGraph, chunks: int | None = None) -> Program:
        """The program of one batch on lanes ``rank0``, ``rank1``, …: compute actions and the edges of `graph`.

        Raises:
            ScheduleError: the schedule does not allow these stages or micro-batches; the message says what it does.
        """
        per_rank = self.chunks_or_default(chunks)
        self.num_ranks(graph.num_stages, per_rank)
        micro = sum(graph.micro_per_batch)
        if micro > MAX_MICROBATCHES:
            raise ScheduleError(
                f"{self.name}: stages times micro-batches must be at most {MAX_MICROBATCHES}, got {micro}"
            )
        backward = next(((p, c) for p, c in graph.edges if p >= c), None)
        if self.linear and backward is not None:
            raise ScheduleError(
                f"{self.name}: every edge must lead to a higher stage number, got {backward[0]}-{backward[1]}"
            )
        return self.builder(graph, per_rank)


_REGISTERED: dict[str, DenseSchedule] = {}


def register(
    name: str,
    summary: str,
    *,
    chunks: int = 1,
    fixed_chunks: bool = True,
    num_pipes: int = 1,
    linear: bool = True,
) -> Callable[[Builder], Builder]:
    """Decorator of a builder: make it known by name. For the parameters see `DenseSchedule`."""

    def known(builder: Builder) -> Builder:
        if name in _REGISTERED:
            raise ValueError(f"schedule {name!r} is registered twice")
        _REGISTERED[name] = DenseSchedule(
            name=name,
            summary=summary,
            builder=builder,
            chunks=chunks,
            fixed_chunks=fixed_chunks,
            num_pipes=num_pipes,
            linear=linear,
        )
        return builder

    return known


def registered() -> Mapping[str, DenseSchedule]:
    """All schedules registered so far, by name."""
    return dict(sorted(_REGISTERED.items()))
