"""`FreeOrder`: the order in which a lane takes the units of its tracks in a turn: as they become ready, or as recorded.

    heads of the tracks ──the first whose requirements are met──> unit      none: Board.wait_any, and again
    LaneOrder.given(b)  ──tracks in their recorded order────────> unit      its requirements are waited for
    at the end of a turn: LaneOrder.taken(b, tracks)

Every track keeps its own order, so an op finishes its actions in the same order whatever the tracks do. Sums are
therefore the same bit for bit, and all counters keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bagpipe.pipeline.board import Board
from bagpipe.pipeline.compile import LanePlan, Step

__all__ = ["FreeOrder", "LaneOrder"]


class LaneOrder(Protocol):
    """Orders of one lane, batch by batch: given before, or taken down. Called in the lane's thread."""

    def given(self, batch: int) -> Sequence[int] | None:
        """The tracks of a batch's units, one after the other; None: take what is ready.

        Also asked for the batch after the last one, whose end no lane may know yet.
        """
        ...

    def taken(self, batch: int, tracks: Sequence[int]) -> None:
        """The order that a batch has had."""
        ...


class FreeOrder:
    """Chooses the steps of a lane's tracks. Only the lane's thread uses it.

    Args:
        plan: the steps of the lane.
        board: progress of all lanes.
        order: orders given and taken; None: neither.
        wait_any: waits until one of several needs (op -> units) is met; False if the data ends before the batch.
    """

    def __init__(
        self,
        *,
        plan: LanePlan,
        board: Board,
        order: LaneOrder | None,
        wait_any: Callable[[Mapping[int, int], int], bool],
    ) -> None:
        self._plan = plan
        self._board = board
        self._order = order
        self._wait_any = wait_any
        self._heads = [0] * len(plan.tracks)
        self._taken: list[int] = []
        self._given: Sequence[int] | None = None
        self._rest: list[Step] = []  # of the unit that is being done, last step first

    def step(self, position: int, batch: int) -> Step:
        """The step at a position of the turn; called for each position in turn."""
        plan = self._plan
        if not plan.first_free <= position < plan.end_free:
            return plan.steps[position]
        if position == plan.first_free:
            self._begin(batch)
        if not self._rest:
            track = self._next_track(batch)
            self._rest = list(reversed(plan.tracks[track][self._heads[track]]))
            self._heads[track] += 1
            self._taken.append(track)
        if position + 1 == plan.end_free and self._order is not None and batch < self._board.end:
            self._order.taken(batch, self._taken)
        return self._rest.pop()

    def _begin(self, batch: int) -> None:
        self._heads = [0] * len(self._plan.tracks)
        self._taken = []
        self._given = None
        if self._order is not None and batch < self._board.end:
            self._given = self._order.given(batch)

    def _next_track(self, batch: int) -> int:
        if self._given is not None:
            return self._given[len(self._taken)]
        tracks = self._plan.tracks
        heads = [track for track, units in enumerate(tracks) if self._heads[track] < len(units)]
        while batch < self._board.end:
            needs: dict[int, int] = {}
            for track in heads:
                missing = self._missing(tracks[track][self._heads[track]][0], batch)
                if missing is None:
                    return track
                op, need = missing
                needs[op] = min(need, needs.get(op, need))
            if not self._wait_any(needs, batch):
                break
        return heads[0]  # of a batch that does not exist

    def _missing(self, step: Step, batch: int) -> tuple[int, int] | None:
        """(op, units) of a requirement that is not met; None: there is none."""
        for r in step.requirements:
            need = (batch - r.delay) * r.actions + r.position
            if self._board.done[r.op] < need:
                return r.op, need
        return None
