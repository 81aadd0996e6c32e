"""`Schedule`: a named schedule: its command-line options, and the program they give.

options ──PrefetchSchedule.program──> Program of the training loop
        ──DenseSchedule.program────┐
StageGraph ──DenseSchedule.build───┴──> Program of the dense stages
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.dynamic import limits
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, parse_stage_graph

__all__ = [
    "AsynchronousSchedule",
    "Builder",
    "DenseSchedule",
    "DynamicSchedule",
    "Option",
    "PrefetchSchedule",
    "Schedule",
]

#: Limit for the micro-batches of all stages together: a larger program would exhaust memory.
MAX_MICROBATCHES = 1_000_000

#: (stages, stages per rank) -> compute actions: the Program of one batch, or a Loop for an asynchronous schedule.
#: A schedule with settings takes them as keyword arguments.
Builder = Callable[..., Program | Loop]

#: Option name -> value, of the type of the option's default.
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One command-line option of a schedule. A default of False makes it a switch."""

    name: str
    default: int | float | str | bool
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """A named schedule.

    Attributes:
        name: the name users give.
        summary: one line.
    """

    name: str
    summary: str

    @property
    @abstractmethod
    def options(self) -> tuple[Option, ...]:
        """The command-line options."""

    @abstractmethod
    def program(self, values: Values) -> Program:
        """The program for the options' values.

        Raises:
            ScheduleError: the schedule does not allow them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchSchedule(Schedule):
    """The prefetch pipeline, unrolled for some batches."""

    @property
    def options(self) -> tuple[Option, ...]:
        return (
            Option(name="batches", default=4, help="batches to show"),
            Option(name="prefetch_depth", default=4, help="most batches fetched and not yet inserted"),
            Option(name="read_ahead", default=8, help="most batches read and not yet trained"),
            Option(name="write_depth", default=2, help="most batches evicted and not yet stored"),
            Option(name="microbatches", default=1, help="micro-batches per batch"),
            Option(name="ranks", default=1, help="ranks of the job; the program is that of one rank"),
            Option(name="evaluate", default=False, help="the evaluation pipeline: forwards only"),
            Option(
                name="direct", default=False, help="hazards of direct mode: no cache, each batch waits for the last"
            ),
            Option(
                name="evict_lag",
                default=0,
                help="batches from the last use of rows to their eviction: 1, they wait for the batch before; 2, they "
                "leave from spare slots; default: 0, as each plan says, which shows no wait",
            ),
            Option(name="clips", default=False, help="the norm of row gradients is limited, over all ranks"),
        )

    def program(self, values: Values) -> Program:
        loop = prefetch_loop(
            prefetch_depth=values["prefetch_depth"],
            read_ahead=values["read_ahead"],
            write_depth=values["write_depth"],
            microbatches=values["microbatches"],
            train=not values["evaluate"],
            direct=values["direct"],
            evict_lag=values["evict_lag"] or None,
            ranks=values["ranks"],
            clips=values["clips"],
        )
        return loop.unroll(values["batches"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSchedule(Schedule):
    """A schedule of dense stages.

    Attributes:
        builder: makes the actions; raises ScheduleError with what it allows.
        chunks: default number of stages per rank.
        fixed_chunks: no other number is allowed.
        num_pipes: directions in which micro-batches travel; every rank holds that many stages.
        linear: every edge must lead to a higher stage number.
        ranks: fixed number of ranks, whatever the stages per rank; None: stages / chunks.
        settings: options of the schedule's own: keyword arguments of the builder, and keys of the same names of a job's
            ``pipeline`` section.
        uses_costs: the builder also takes ``costs`` and ``latency``, as `simulate` does, and chooses the order by them.
    """

    builder: Builder
    chunks: int = 1
    fixed_chunks: bool = True
    num_pipes: int = 1
    linear: bool = True
    ranks: int | None = None
    settings: tuple[Option, ...] = ()
    uses_costs: bool = False

    @property
    def options(self) -> tuple[Option, ...]:
        return (
            Option(name="stages", default=4, help="stages of the model; a rank holds CHUNKS of them"),
            Option(name="microbatches", default="8", help="micro-batches per batch: one number, or one per stage"),
            Option(name="chunks", default=self.chunks, help="stages per rank"),
            Option(name="edges", default="", help="which stage feeds which, such as 0-2,1-2,2-3; default: a chain"),
            *self.settings,
        )

    def program(self, values: Values) -> Program:
        graph = parse_stage_graph(values["stages"], values["microbatches"], values["edges"])
        own = [setting.name for setting in self.settings] + (["costs", "latency"] if self.uses_costs else [])
        return self.configured({name: values[name] for name in own if name in values}).build(graph, values["chunks"])

    def configured(self, settings: Values) -> DenseSchedule:
        """The schedule with values for its settings, and costs if it uses them; the others keep their defaults."""
        return replace(self, builder=partial(self.builder, **settings)) if settings else self

    def num_ranks(self, num_stages: int, chunks: int | None = None) -> int:
        """Ranks that hold `num_stages` stages.

        Raises:
            ScheduleError: there is no stage, the chunks are not allowed, or they do not divide the stages. A schedule
                with a fixed number of ranks allows any number of stages.
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
            ScheduleError: the schedule does not allow that number.
        """
        if chunks is None:
            return self.chunks
        if chunks < 1 or (self.fixed_chunks and chunks != self.chunks):
            allowed = str(self.chunks) if self.fixed_chunks else "at least 1"
            raise ScheduleError(f"{self.name}: chunks must be {allowed}, got {chunks}")
        return chunks

    def build(self, graph: StageGraph, chunks: int | None = None, *, num_batches: int = 1) -> Program:
        """The program on lanes ``rank0``, ``rank1``, …: compute actions and the edges of `graph`.

        Args:
            graph: the stages.
            chunks: stages per rank; None: the schedule's default.
            num_batches: batches; a schedule whose builder makes one batch allows only 1.

        Raises:
            ScheduleError: the schedule does not allow these stages, micro-batches or batches.
        """
        built = self.builder(graph, self._allowed_chunks(graph, chunks))
        if isinstance(built, Loop):
            return built.unroll(num_batches)
        if num_batches != 1:
            raise ScheduleError(f"{self.name}: one batch at a time, got {num_batches} batches")
        return built

    def _allowed_chunks(self, graph: StageGraph, chunks: int | None) -> int:
        """Stages per rank, after a check of the stages and of the number of micro-batches."""
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
        return per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSchedule(DenseSchedule):
    """A synchronous schedule whose ranks choose their order while they run; its builder shows one such order.

    Attributes:
        in_flight: see `limits`.
    """

    in_flight: int = 0

    def program(self, values: Values) -> Program:
        graph = parse_stage_graph(values["stages"], values["microbatches"], values["edges"])
        own = {name: values[name] for name in ("in_flight", "costs", "latency") if name in values}
        return self.configured(own).build(graph, values["chunks"])

    def configured(self, settings: Values) -> DynamicSchedule:
        limit = settings.get("in_flight", self.in_flight)
        return replace(self, builder=partial(self.builder, **settings), in_flight=limit)

    def limits(self, graph: StageGraph) -> tuple[int, ...]:
        """Most micro-batches in flight, per rank.

        Raises:
            ScheduleError: `in_flight` is negative.
        """
        return limits(graph, self.in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousSchedule(DenseSchedule):
    """A schedule of dense stages that never drains between batches, and so trains with weights that are behind."""

    @property
    def options(self) -> tuple[Option, ...]:
        return (*DenseSchedule.options.__get__(self), Option(name="batches", default=4, help="batches to show"))

    def program(self, values: Values) -> Program:
        graph = parse_stage_graph(values["stages"], values["microbatches"], values["edges"])
        own = self.configured({setting.name: values[setting.name] for setting in self.settings})
        return own.build(graph, values["chunks"], num_batches=values["batches"])

    def loop(self, graph: StageGraph, chunks: int | None = None) -> Loop:
        """The steady state on lanes ``rank0``, ``rank1``, …

        Args:
            graph: the stages.
            chunks: stages per rank; None: the schedule's default.

        Raises:
            ScheduleError: the schedule does not allow these stages or micro-batches.
        """
        built = self.builder(graph, self._allowed_chunks(graph, chunks))
        assert isinstance(built, Loop), "the builder of an asynchronous schedule makes a loop"
        return built
