"""`RankedPlanner`: every rank brings its own batches, rank 0 plans for all.

    rank 0   BRING ──> every rank: has it a batch?   ids ──> rank 0: one global batch, examples in rank order ──> window
             PLAN  ──> every rank: its part of the oldest batch's plan
             END, ERROR ──> every rank

Rank 0 says what comes next, so all ranks make the same calls in the same order, however many batches its planner reads
ahead. Only ids and plans travel.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

from bagpipe.client.codec import decode_rank_batch
from bagpipe.distributed.failure import Failure
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError, PeerError
from bagpipe.lookahead.frames import decode_error, encode_error
from bagpipe.lookahead.ids import concatenate, decode_ids, empty_batch, encode_ids
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.planning import in_order
from bagpipe.lookahead.transport import RankTransport
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch

__all__ = ["RankedPlanner", "Uneven"]

#: What happens when the batches of one rank end before those of another: all stop before that batch, or the rank goes
#: on with batches without examples.
Uneven = Literal["stop", "join"]


class _Command(enum.IntEnum):
    """The next action of all ranks, as rank 0 says."""

    BRING = 1
    PLAN = 2
    END = 3
    BAD_INPUT = 4  # an error of the global batches, equal on all ranks
    FAILED = 5  # the failures of some ranks


class _Status(enum.IntEnum):
    """The contribution of a rank."""

    BATCH = 1
    NOTHING = 2
    FAILURE = 3


class _RanksFailed(Exception):
    """The batches of some ranks have failed."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__()
        self.failures = failures


@dataclass(slots=True, kw_only=True)
class _Own:
    """This rank's batches.

    Attributes:
        batches: not yet read.
        index: of the next batch.
        waiting: read and not yet planned.
        num_features: of the batches; 0: unknown.
        error: of `batches`.
        has_ended: nothing more is read.
    """

    batches: Iterator[Batch]
    index: int
    waiting: deque[Batch]
    num_features: int = 0
    error: Exception | None = None
    has_ended: bool = False

    def next(self) -> Batch | None:
        """The next batch. None at the end, or if reading it failed."""
        if self.has_ended:
            return None
        try:
            batch = next(self.batches, None)
        except Exception as raised:
            self.error, batch = raised, None
        self.has_ended = batch is None
        if batch is not None:
            self.num_features = batch.num_features
        return batch


class RankedPlanner:
    """A `BatchPlanner` of one rank among several. Every rank makes one, and all make the same calls.

    A rank's batch b is its part of global batch b, with as many micro-batches as that of any rank: those that a rank
    lacks have no examples. All ranks begin at the same batch. If the batches of a rank raise an error, all ranks get
    the batches before; then that rank raises the error, and the others that of a failed rank.

    Args:
        spec: what to plan for, for all ranks. The examples are always assigned to the ranks that brought them.
        group: all ranks, on the host; for this planner alone, from one thread.
        planner: makes rank 0's planner.
        uneven: when one rank's batches end before another's: "stop", all ranks stop before that batch; "join", the rank
            gets batches without examples until those of all ranks have ended.

    Attributes:
        spec: of the plans.

    Raises:
        InputError: `spec` cannot be planned for, or `uneven` is unknown.
        ValueError: `spec` and `group` differ in the number of ranks.
        PeerError: `run`: another rank is gone, failed, or has missed the deadline.
    """

    def __init__(
        self,
        spec: OracleSpec,
        group: RankGroup,
        *,
        planner: Callable[[OracleSpec], WindowPlanner] = PlannerProcess,
        uneven: Uneven = "stop",
    ) -> None:
        if spec.world_size != group.world_size:
            raise ValueError(f"expected a spec for {group.world_size} ranks, got {spec.world_size}")
        if uneven not in get_args(Uneven):
            raise InputError(f"uneven must be one of {', '.join(get_args(Uneven))}, got {uneven!r}")
        self.spec = dataclasses.replace(spec, assign="own", example_shares=())
        self._planner = planner(self.spec)
        self._uneven = uneven
        self._transport = RankTransport(group)

    @property
    def max_held(self) -> int:
        """See `BatchPlanner`."""
        return self._planner.max_held

    def __enter__(self) -> Self:
        if self._transport.rank == 0:
            self._planner.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._planner.close()

    def run(self, batches: Iterable[Batch], first_batch: int = 0) -> Generator[RankBatch, None, None]:
        """See `BatchPlanner`. A rank whose batches have ended gets new ones without examples if the others go on."""
        own = _Own(batches=in_order(batches, first_batch), index=first_batch, waiting=deque())
        return self._lead(own, first_batch) if self._transport.rank == 0 else self._follow(own)

    def _lead(self, own: _Own, first_batch: int) -> Generator[RankBatch, None, None]:
        """Rank 0: plan, and say what comes next."""
        ranks = range(self.spec.world_size)
        try:
            with closing(self._planner.plan_all(self._global_batches(own), first_batch, lambda batch: None)) as plans:
                for plan in plans:
                    frames = [plan.frame(rank) if rank else [] for rank in ranks]
                    sizes = [sum(map(len, frame)) for frame in frames]
                    self._say(_Command.PLAN, sizes)
                    self._transport.scatter_bytes(frames, sizes)
                    yield plan.part(0, own.waiting.popleft())
        except PeerError:
            raise  # the others cannot be told
        except _RanksFailed as error:
            self._say_bytes(_Command.FAILED, _encode_failures(error.failures))
            raise self._error_of(own, error.failures) from None
        except InputError as error:
            self._say_bytes(_Command.BAD_INPUT, encode_error(error))
            raise
        except Exception as error:
            self._say_bytes(_Command.FAILED, _encode_failures([Failure.of(0, error)]))
            raise
        self._say(_Command.END)

    def _follow(self, own: _Own) -> Generator[RankBatch, None, None]:
        """Other ranks: do what rank 0 says."""
        while True:
            command, *sizes = self._transport.share_numbers([0] * (1 + self.spec.world_size))
            if command == _Command.BRING:
                self._bring(own)
            elif command == _Command.PLAN:
                part = decode_rank_batch(self._transport.scatter_bytes([], sizes))
                yield dataclasses.replace(part, batch=own.waiting.popleft())
            elif command == _Command.END:
                return
            else:
                data = self._transport.share_bytes(b"", sizes[0])
                if command == _Command.BAD_INPUT:
                    raise decode_error(data)
                raise self._error_of(own, _decode_failures(data))

    def _global_batches(self, own: _Own) -> Iterator[Batch]:
        """At rank 0: the ranks' batches as one."""
        while True:
            self._say(_Command.BRING)
            parts = self._bring(own)
            if not parts:
                return
            numbers = {part.num_features for part in parts}
            if len(numbers) > 1:
                brought = ", ".join(f"{part.num_features} from rank {rank}" for rank, part in enumerate(parts))
                raise InputError(f"batch {parts[0].index}: expected as many features from every rank, got {brought}")
            yield concatenate(parts)

    def _bring(self, own: _Own) -> list[Batch]:
        """Every rank brings its next batch, or stops.

        Returns:
            At rank 0: the ranks' batches; [] at the end. [] elsewhere.

        Raises:
            _RanksFailed: at rank 0: the batches of a rank have failed.
        """
        batch = own.next()
        status, frame = _Status.NOTHING, list[Any]()
        if own.error is not None:
            status, frame = _Status.FAILURE, [_encode_failures([Failure.of(self._transport.rank, own.error)])]
        elif batch is not None:
            status, frame = _Status.BATCH, [*encode_ids(batch)]
        num_parts = len(batch.parts) if batch is not None else 0
        rows = self._transport.gather_numbers([status, own.num_features, sum(map(len, frame)), num_parts])
        statuses = [row[0] for row in rows]
        if _Status.FAILURE in statuses:
            own.has_ended = True
            self._gather_failures(own, frame, rows)
            return []
        if _Status.BATCH not in statuses or (self._uneven == "stop" and _Status.NOTHING in statuses):
            own.has_ended = True
            return []
        own.num_features = max(row[1] for row in rows)
        none = empty_batch(own.index, own.num_features)
        batch = none if batch is None else batch
        lacking = max(row[3] for row in rows) - num_parts
        own.waiting.append(dataclasses.replace(batch, parts=batch.parts + (none,) * lacking) if lacking else batch)
        index, own.index = own.index, own.index + 1
        frames = self._transport.gather_bytes(frame, [row[2] for row in rows])
        others = [decode_ids(data) if data else empty_batch(index, own.num_features) for data in frames[1:]]
        return [own.waiting[-1], *others] if frames else []

    def _gather_failures(self, own: _Own, frame: Sequence[Any], rows: Sequence[Sequence[int]]) -> None:
        sizes = [size if status == _Status.FAILURE else 0 for status, _, size, _ in rows]
        frames = self._transport.gather_bytes(frame if sizes[self._transport.rank] else [], sizes)
        if self._transport.rank == 0:
            mine = [Failure.of(0, own.error)] if own.error is not None else []
            raise _RanksFailed([*mine, *(failure for data in frames if data for failure in _decode_failures(data))])

    def _say(self, command: _Command, sizes: Sequence[int] = ()) -> None:
        """At rank 0: what comes next, and how many bytes each rank gets then."""
        self._transport.share_numbers([command, *(sizes or [0] * self.spec.world_size)])

    def _say_bytes(self, command: _Command, data: bytes) -> None:
        """At rank 0: how the run ends. A rank that cannot be told has failed, which is known otherwise."""
        with suppress(PeerError):
            self._say(command, [len(data)] * self.spec.world_size)
            self._transport.share_bytes(data, len(data))

    def _error_of(self, own: _Own, failures: Sequence[Failure]) -> BaseException:
        """The error that this rank raises for the failures of some ranks."""
        is_mine = any(failure.rank == self._transport.rank for failure in failures)
        return own.error if is_mine and own.error is not None else failures[0].error()


def _encode_failures(failures: Sequence[Failure]) -> bytes:
    return json.dumps([asdict(failure) for failure in failures]).encode()


def _decode_failures(data: bytearray) -> list[Failure]:
    return [Failure(**failure) for failure in json.loads(data)]
