"""`Evaluation`: scores of every batch, nothing changed; `EvaluationOfRanks`: with rows on their ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext
from bagpipe.cache.row_exchange import RowExchange
from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.dense.loss import as_heads, total_loss
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.training.phase import Phase

if TYPE_CHECKING:
    from bagpipe.training.engine import Engine

__all__ = ["Evaluation", "EvaluationOfRanks"]


class Evaluation(Phase):
    train = False

    def __init__(
        self, engine: Engine, batches: Iterator[RankBatch], on_scores: Callable[[Tensor, Tensor], None]
    ) -> None:
        super().__init__(engine, batches)
        self.on_scores = on_scores
        # Bounded: a batch is read when the one `read_ahead` before it is done, and its scores have come then.
        self._arriving: deque[tuple[PendingTensor, PendingTensor]] = deque()

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {"X_READ": self.read, "X_FETCH": self.get, "X_INSERT": self.replace, "F": self.score}

    def replace(self, b: int) -> None:
        """Rows are clean, so those that leave are simply forgotten."""
        self.cache.evict(self.in_flight[b].rank_batch.owner)
        self.put(b)

    def score(self, b: int) -> None:
        """Scores are those of the first head, in the dtype of the parameters: no two are equal by rounding only."""
        flight = self.in_flight[b]
        self.begin(flight.context)
        inputs = flight.inputs
        if inputs is None:  # few models take an empty batch
            return
        with torch.no_grad():
            heads = as_heads(self.engine.model(inputs.dense, inputs.sparse))
            flight.loss_sum = total_loss(heads, inputs.labels)
            self.add_loss(b)
            self._arriving.append((self._to_host(heads[0]), self._to_host(inputs.labels)))
        while self._arriving and all(arrival.is_ready() for arrival in self._arriving[0]):
            self._give_scores()

    def end(self) -> None:
        """Nothing changed, so there is nothing to write back; the last scores are still to come."""
        while self._arriving:
            self._give_scores()

    def _to_host(self, tensor: Tensor) -> PendingTensor:
        return to_host(self.cache.streams, tensor)

    def _give_scores(self) -> None:
        logits, labels = self._arriving.popleft()
        self.on_scores(logits.get(), labels.get())


class EvaluationOfRanks(Evaluation):
    """Rows travel to the ranks that use them; nothing changes them, so all of a batch's rows travel ahead."""

    row_waits = ("0X_PREPULL",)

    def __init__(
        self, engine: Engine, batches: Iterator[RankBatch], on_scores: Callable[[Tensor, Tensor], None]
    ) -> None:
        super().__init__(engine, batches, on_scores)
        assert engine.peers is not None, "one rank scores without"
        self.exchange = RowExchange(engine.cache, engine.peers)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {**super().handlers(), "X_PREPULL": self.pull}

    def begin(self, context: BatchContext) -> None:
        self.exchange.begin(context)

    def pull(self, b: int) -> None:
        context = self.in_flight[b].context
        self.exchange.early(context)
        self.exchange.pull(context)
