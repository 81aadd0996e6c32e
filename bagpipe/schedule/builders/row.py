"""`Row`: the actions of a rank while a builder adds them. The row numbers the micro-batches.

    row.add(2, "F", 3)     2F0 2F1 2F2          the n-th F of a stage is that of micro-batch n - 1
    row.add(2, "IW")       2I0 2W0
    row.overlap(0, 3)      (0F0;3B0)OVERLAP_F_B
    row.weight()           W of the oldest I without one; add(stage, "W"): of the oldest of that stage

B and I share one count per stage, since a full backward B includes the input gradient.
"""

from __future__ import annotations

from collections import Counter

from bagpipe.schedule.ir.actions import Action

__all__ = ["Row"]


class Row:
    """Actions in the order of addition; a stage's micro-batches count from 0. A W needs an earlier I."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._added: Counter[tuple[int, str]] = Counter()
        self._waiting: list[Action] = []  # input gradients whose W is not added yet

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions added so far."""
        return tuple(self._actions)

    def add(self, stage: int, ops: str, times: int = 1) -> None:
        """Append the ops (one letter each: F, B, I, W) of a stage, `times` times; nothing if `times` is below 1."""
        self._actions += [self._next(stage, op) for _ in range(times) for op in ops]

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        """Append the next forward of one stage and the next full backward of another as one action."""
        parts = (self._next(forward_stage, "F"), self._next(backward_stage, "B"))
        self._actions.append(Action(-1, "OVERLAP_F_B", parts=parts))

    def weight(self) -> None:
        """Append the W of the oldest I without one; nothing if there is none."""
        if self._waiting:
            self.add(self._waiting[0].stage, "W")

    def _next(self, stage: int, op: str) -> Action:
        if op == "W":
            half = next(action for action in self._waiting if action.stage == stage)
            self._waiting.remove(half)
            return Action(stage, op, half.index)
        counted = "F" if op == "F" else "I"  # a full backward is an input gradient too
        action = Action(stage, op, self._added[stage, counted])
        self._added[stage, counted] += 1
        if op == "I":
            self._waiting.append(action)
        return action
