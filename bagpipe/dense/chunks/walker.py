"""`Walker`: gives each moment its chunks, by the plan of the batch before, or on demand.

    begin ──> enter(moment), enter(moment), … ──> end: was this the order of the plan? else another plan
              │ the plan's moves before it, made ahead; or, off the plan, what is missing, for what was used longest ago
              └ wait for its chunks

The first batch has no plan: its order is recorded. A batch that takes another order (a smaller one, a lane that chooses
its order) goes on demand from its first other moment. An order that comes again is planned, and its
plan is kept for later batches. Evaluations go on demand, and are not recorded. What is planned decides when chunks
move, and no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagpipe.dense.chunks.arena import Arena
from bagpipe.dense.chunks.moments import Moment
from bagpipe.dense.chunks.moves import Move, MovePlan
from bagpipe.dense.chunks.simulate import best_plan
from bagpipe.errors import InputError

#: Orders whose plans are kept.
_MAX_PLANS = 8

__all__ = ["Walker"]


class Walker:
    """See above.

    Args:
        arena: the chunks.
        budget: what limits its slots, for messages: ``dense.budget_bytes 4096``.

    Attributes:
        plan: that batches follow; None: no batch has ended.
    """

    def __init__(self, arena: Arena, budget: str) -> None:
        self.arena = arena
        self.plan: MovePlan | None = None
        self._budget = budget
        self._plans: dict[tuple[Moment, ...], MovePlan] = {}
        self._latest: tuple[Moment, ...] = ()  # order of the latest batch
        self._moves: Mapping[int, Sequence[Move]] = {}
        self._batch = 0  # of the plan
        self._recorded: list[Moment] | None = None  # None: between batches
        self._is_planned = False
        self._current: Moment | None = None
        self._last_used: dict[int, int] = {}  # in the order of the latest use
        self._clock = 0

    @property
    def current(self) -> Moment | None:
        """The moment that was entered last."""
        return self._current

    def begin(self) -> None:
        """A batch begins."""
        self._recorded, self._current = [], None
        self._is_planned = self.plan is not None
        if self.plan is not None:
            self._hold(self.plan.starts[self._batch])

    def end(self) -> None:
        """The batch is over."""
        recorded, self._recorded, self._current = tuple(self._recorded or ()), None, None
        if self.plan is not None and self._is_planned and len(recorded) == len(self.plan.trace):
            self._batch = (self._batch + 1) % self.plan.num_batches
        elif recorded:
            self._follow(recorded)
            self._latest = recorded

    def enter(self, moment: Moment) -> None:
        """Have the chunks of a moment on the device; those of the moment before may leave.

        Raises:
            InputError: the device does not hold so many chunks.
        """
        self._current = moment
        if self._recorded is None:
            self._fetch(moment)
        else:
            self._walk(moment)
        for use in moment.uses:
            self.arena.use(use.chunk, writes=use.writes)
            self._clock += 1
            self._last_used[use.chunk] = self._clock

    def rest(self) -> None:
        """Every chunk is home, and no batch is under way. The next one begins where the plan begins."""
        self._recorded, self._current, self._batch = None, None, 0
        self.arena.go_home()

    def _follow(self, order: tuple[Moment, ...]) -> None:
        """A batch took another order than that of the plan: follow it, if it is likely to come again."""
        self._batch = 0
        plan = self._plans.get(order)
        if plan is None:
            if self.plan is not None and order != self._latest:
                return
            plan = best_plan(order, self.arena.num_slots)
            if len(self._plans) == _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[order] = plan
        self.plan, self._moves = plan, plan.by_moment()

    def _walk(self, moment: Moment) -> None:
        """The next moment of a batch."""
        assert self._recorded is not None, "begun"
        number = len(self._recorded)
        self._recorded.append(moment)
        plan = self.plan
        if not self._is_planned or plan is None or number >= len(plan.trace) or plan.trace[number] != moment:
            self._is_planned = False
            self._fetch(moment)
            return
        for move in self._moves.get(self._batch * len(plan.trace) + number, ()):
            (self.arena.come if move.to == "device" else self.arena.leave)(move.chunk)

    def _fetch(self, moment: Moment) -> None:
        """On demand: bring what is missing."""
        arena, wanted = self.arena, moment.chunks
        if len(wanted) > arena.num_slots:
            raise InputError(
                f"{self._budget} is below what {moment.name} uses at once: {len(wanted) * arena.chunk_bytes} bytes, "
                f"{len(wanted)} chunks of {arena.chunk_bytes}"
            )
        for chunk in sorted(wanted - arena.held):
            if not arena.has_room:
                others = arena.held - wanted
                # What is dead costs nothing.
                arena.leave(min(others, key=lambda other: (other not in arena.dead, self._last_used.get(other, 0))))
            arena.come(chunk)

    def _hold(self, chunks: frozenset[int]) -> None:
        """Have exactly these chunks on the device, or on their way."""
        if self.arena.held == chunks:
            return
        self.arena.settle()
        for chunk in sorted(self.arena.held - chunks):
            self.arena.leave(chunk)
        for chunk in sorted(chunks - self.arena.held):
            self.arena.come(chunk)
