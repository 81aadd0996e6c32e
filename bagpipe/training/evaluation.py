"""`Scoring`: the forward of evaluation. It changes nothing and hands out the scores of every batch.

F  model(dense, sparse) ──> logits ──copy to the host──> on_scores(logits, labels)        lane compute
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bagpipe.cache.staging import PendingTensor, to_host
from bagpipe.dense.loss import BCE, Loss, as_heads
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.builders.prefetch_loop import declare_evaluation
from bagpipe.schedule.ir.loop_builder import LoopBuilder
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.types.model_inputs import device_of

__all__ = ["OnScores", "Scoring"]

#: Logits and labels ``[num_examples]`` of one batch, on the host. With several labels logits ``[num_examples,
#: num_labels]``; with these, or with weights of examples, targets ``[num_examples, columns]`` (`Batch.targets`).
OnScores = Callable[[Tensor, Tensor], None]


class Scoring(LoopPart):
    """Scores of the first head, or of the head of each label, in the dtype of the parameters, so that rounding creates
    no ties.

    Args:
        model: called as ``model(dense, sparse)``.
        streams: of the model's device.
        on_scores: called in the order of the batches; the last calls come when all lanes have ended.
        loss: whose sum is counted.
    """

    def __init__(self, model: nn.Module, streams: Streams, on_scores: OnScores, loss: Loss = BCE) -> None:
        self._model = model
        self._loss = loss
        self._streams = streams
        self._on_scores = on_scores
        self._run: LoopRun
        self._loss_sum: Tensor
        # Bounded: a batch is read when the one `read_ahead` before it is done, and its scores have come then.
        self._arriving: deque[tuple[PendingTensor, PendingTensor]] = deque()

    def declare(self, loop: LoopBuilder) -> None:
        declare_evaluation(loop)

    def handlers(self) -> Mapping[str, Handler]:
        return {"F": self.forward}

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device_of(self._model))

    def forward(self, b: int) -> None:
        inputs = self._run.in_flight[b].inputs
        if inputs is None:  # few models take an empty batch
            return
        with torch.no_grad():
            heads = as_heads(self._model(inputs.dense, inputs.sparse))
            total = self._loss.total(heads, inputs.labels)
            if self._loss_sum.device != total.device:  # the parameters were in chunks on the host when this began
                self._loss_sum = self._loss_sum.to(total.device)
            self._loss_sum += total
            scores = heads[0] if self._loss.num_labels == 1 else torch.stack(heads, dim=1)
            self._arriving.append((to_host(self._streams, scores), to_host(self._streams, inputs.labels)))
        while self._arriving and all(arrival.is_ready() for arrival in self._arriving[0]):
            self._give_scores()

    def loss_sums(self) -> Mapping[str, Tensor]:
        """The sum of the losses so far; see `DensePart.loss_sums`."""
        return {"model": self._loss_sum}

    def end(self) -> None:
        while self._arriving:
            self._give_scores()

    def _give_scores(self) -> None:
        logits, labels = self._arriving.popleft()
        self._on_scores(logits.get(), labels.get())
