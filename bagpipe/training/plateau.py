"""`PlateauFactor`: the factor of learning rates that drops when the metric of evaluations stops improving.

evaluation between two steps ──metric──> bagpipe.rates.Plateau ──> factor of the batches that follow
checkpoint <──state──> here
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bagpipe.errors import InputError
from bagpipe.rates import Plateau, PlateauState
from bagpipe.training.part import LoopPart, LoopRun

__all__ = ["PlateauFactor"]


class PlateauFactor(LoopPart):
    """A `bagpipe.rates.Shape` whose factor follows metrics; its state is kept in checkpoints, equal on all ranks.

    Args:
        rule: when the factor drops.

    Attributes:
        state: after the metrics so far.
    """

    name = "plateau"

    def __init__(self, rule: Plateau) -> None:
        self.state = PlateauState()
        self._rule = rule

    def start(self, run: LoopRun) -> None:
        """Go on from the carried state.

        Raises:
            InputError: the checkpoint has another kind of value.
        """
        record = run.carried.get(self.name)
        try:
            self.state = PlateauState() if record is None else PlateauState(**record)
        except TypeError:
            raise InputError(f"expected the state of a plateau schedule in the checkpoint, got {record}") from None

    def counters(self) -> Mapping[str, Any]:
        return {self.name: dataclasses.asdict(self.state)}

    def note(self, metric: float | None) -> None:
        """Take one more metric, between two steps; None: it has no value, which is no improvement."""
        self.state = self._rule.update(self.state, math.nan if metric is None else metric)

    def at(self, position: int) -> float:
        """The factor of the batch that is computed."""
        return self._rule.factor(self.state)
