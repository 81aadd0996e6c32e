"""`simulate_moves`: the time of a batch whose chunks move on a copy lane beside its compute.

    compute  | m0 | m1 |wait| m2 | …        a moment waits for the chunks it uses
    copy     | move | move   | move | …     in the plan's order; a move begins when the moments before it are done

`best_plan` looks further ahead as long as that makes a batch faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.dense.chunks.moments import Trace
from bagpipe.dense.chunks.moves import MovePlan, plan_moves

__all__ = ["BatchTime", "best_plan", "simulate_moves"]

#: Lookaheads that are tried, in moments. A copy rarely takes longer than so many.
_LOOKAHEADS = (0, 1, 2, 4)
#: Walks through the plan before the one that is timed: by then the copy lane is as late as it gets.
_WARM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """Times of a batch, in seconds, or whatever the costs are in.

    Attributes:
        compute: without any move.
        total: with the waits for chunks.
        copying: time in which the copy lane copies.
    """

    compute: float
    total: float
    copying: float

    @property
    def ratio(self) -> float:
        """Time with moves by time without."""
        return self.total / self.compute if self.compute else 1.0


def simulate_moves(plan: MovePlan, compute: Sequence[float], copy: float) -> BatchTime:
    """The time of a batch of a plan, in the long run.

    Args:
        plan: the moves.
        compute: time of each moment of the trace.
        copy: time of the copy of one chunk.
    """
    moves = plan.by_moment()
    now = lane = copying = begin = 0.0
    ready: dict[int, float] = {}
    for walk in range(_WARM + 1):
        if walk == _WARM:
            begin, copying = now, 0.0
        for moment in range(plan.num_batches * len(plan.trace)):
            for move in moves.get(moment, ()):
                took = copy if move.copies else 0.0
                lane = max(lane, now) + took
                copying += took
                if move.to == "device":
                    ready[move.chunk] = lane
            number = moment % len(plan.trace)
            now = max([now, *(ready.get(use.chunk, 0.0) for use in plan.trace[number].uses)]) + compute[number]
    return BatchTime(compute=sum(compute), total=(now - begin) / plan.num_batches, copying=copying / plan.num_batches)


def best_plan(trace: Trace, num_slots: int, compute: Sequence[float] | None = None, copy: float = 1.0) -> MovePlan:
    """The plan of the fastest lookahead; the least of several that are as fast.

    Args:
        trace: of a batch.
        num_slots: chunks that the device can hold.
        compute: time of each moment; None: as long as a copy.
        copy: time of the copy of one chunk.

    Raises:
        ScheduleError: a moment uses more chunks than there are slots.
    """
    times = [copy] * len(trace) if compute is None else compute
    plans = [plan_moves(trace, num_slots, lookahead=lookahead) for lookahead in _LOOKAHEADS]
    return min(plans, key=lambda plan: simulate_moves(plan, times, copy).total)
