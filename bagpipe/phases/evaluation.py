"""`Evaluation`: scores of every batch, nothing changed; `EvaluationOfRanks`: with rows on their ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bagpipe.cache.exchange import RowExchange
from bagpipe.cache.step import StepContext
from bagpipe.client.step import Step
from bagpipe.phases.phase import Phase

if TYPE_CHECKING:
    from bagpipe.engine import Engine

__all__ = ["Evaluation", "EvaluationOfRanks"]


class Evaluation(Phase):
    train = False

    def __init__(self, engine: Engine, steps: Iterator[Step], on_scores: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(engine, steps)
        self.on_scores = on_scores

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {"X_READ": self.read, "X_GET": self.get, "X_PUT": self.replace, "F": self.score}

    def replace(self, b: int) -> None:
        """Rows are clean, so those that leave are simply forgotten."""
        self.cache.evict(self.flights[b].step.owner)
        self.put(b)

    def score(self, b: int) -> None:
        """Scores are those of the first head."""
        with torch.no_grad():
            scored = self.forward(b)
            if scored is not None:
                heads, labels = scored
                self.loss(b, heads, labels)
                self.add_loss(b)
                self.on_scores(heads[0], labels)

    def end(self) -> None:
        """Nothing changed, so there is nothing to write back."""


class EvaluationOfRanks(Evaluation):
    """Rows travel to the ranks that use them; nothing changes them, so all of a batch's rows travel ahead."""

    row_waits = ("0X_PREPULL",)

    def __init__(self, engine: Engine, steps: Iterator[Step], on_scores: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(engine, steps, on_scores)
        assert engine.peers is not None, "one rank scores without"
        self.exchange = RowExchange(engine.cache, engine.peers)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {**super().handlers(), "X_PREPULL": self.pull}

    def begin(self, context: StepContext) -> None:
        self.exchange.begin(context)

    def pull(self, b: int) -> None:
        context = self.flights[b].context
        self.exchange.early(context)
        self.exchange.pull(context)
