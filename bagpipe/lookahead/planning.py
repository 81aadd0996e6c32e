"""`planned_batches`: plans of a stream of batches. Its errors come where a trainer can use them.

    batches ──in_order──> push ──is the window full?──> Planned
                            └─ too large: the error names the cache that the window needs

An error of the stream, or an id outside its table, is raised after the plans of the batches before. A batch that cannot
fit the cache is raised at once, because the job cannot run as configured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

from bagpipe.errors import CapacityError, InputError
from bagpipe.lookahead.frames import encode_part
from bagpipe.lookahead.ids import empty_batch
from bagpipe.oracle.capacity import capacity_error
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import CachePlan
from bagpipe.oracle.planner import Planner
from bagpipe.oracle.rank_batch import PlanSpan, RankBatch
from bagpipe.types.batch import Batch

__all__ = ["Planned", "in_order", "planned_batches"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """The plan of a global batch.

    Attributes:
        plan: for all ranks.
        num_examples: of the global batch.
        span: when the batch was read and planned.
    """

    plan: CachePlan
    num_examples: int
    span: PlanSpan

    def part(self, rank: int, batch: Batch) -> RankBatch:
        """A rank's part, with the rank's own batch."""
        return RankBatch(
            batch=batch,
            consumer=self.plan.consumers[rank],
            owner=self.plan.owners[rank],
            num_global_examples=self.num_examples,
            span=self.span,
            exchange=self.plan.exchanges[rank] if self.plan.exchanges else None,
        )

    def frame(self, rank: int) -> list[bytes | memoryview]:
        """See `GlobalPlan`."""
        return encode_part(self.part(rank, empty_batch(self.plan.batch_index, 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A batch in the window. The planner keeps what it needs of the ids."""

    num_examples: int
    read_start_ns: int


def in_order(batches: Iterable[Batch], first_batch: int) -> Iterator[Batch]:
    """The batches from `first_batch` on.

    Raises:
        InputError: a batch is missing, or comes twice.
    """
    expected: int | None = None
    for batch in batches:
        if batch.index > first_batch if expected is None else batch.index != expected:
            wanted = first_batch if expected is None else expected
            raise InputError(f"expected batch {wanted}, got batch {batch.index}: batches come in order, without gaps")
        expected = batch.index + 1
        if batch.index >= first_batch:
            yield batch


def planned_batches(
    planner: Planner | DirectPlanner,
    batches: Iterator[Batch],
    *,
    on_batch: Callable[[Batch], object] = lambda batch: None,
    on_too_large: Callable[[], object] = lambda: None,
) -> Generator[Planned, None, None]:
    """Plans of consecutive batches, in order. Holds no batch; at most `spec.lookahead` are read and not planned.

    Args:
        planner: from `make_planner`; knows no batch.
        batches: the batches.
        on_batch: called with each batch that has entered the window.
        on_too_large: called when a batch does not fit. Up to ``spec.lookahead - 1`` more are then read for the error.

    Raises:
        CapacityError: a batch does not fit the cache.
        Exception: see the module.
    """
    window: deque[_Waiting] = deque()
    error: Exception | None = None
    while True:
        read_start_ns = time.monotonic_ns()
        try:
            batch = next(batches, None)
        except Exception as raised:
            error = raised
            break
        if batch is None:
            break
        try:
            planner.push(batch)
        except CapacityError:
            assert isinstance(planner, Planner), "direct mode has no capacity"
            on_too_large()
            raise capacity_error(planner, batch, _while_good(batches), pushed=True) from None
        except InputError as raised:
            error = raised
            break
        on_batch(batch)
        window.append(_Waiting(num_examples=batch.num_examples, read_start_ns=read_start_ns))
        if planner.is_ready:
            yield _plan(planner, window)
    while window:
        yield _plan(planner, window)
    if error is not None:
        raise error


def _plan(planner: Planner | DirectPlanner, window: deque[_Waiting]) -> Planned:
    start_ns = time.monotonic_ns()
    plan = planner.plan()
    waiting = window.popleft()
    span = PlanSpan(read_start_ns=waiting.read_start_ns, plan_start_ns=start_ns, plan_end_ns=time.monotonic_ns())
    return Planned(plan=plan, num_examples=waiting.num_examples, span=span)


def _while_good(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches up to an error of their iterator."""
    while True:
        try:
            batch = next(batches, None)
        except Exception:
            return
        if batch is None:
            return
        yield batch
