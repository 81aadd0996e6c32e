"""`Outputs`: the part of an evaluation whose batches the caller scores, with the user's model, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.loss_executor import call_model
from bagpipe.pipeline.interpret import Handler
from bagpipe.schedule.builders.prefetch_loop import declare_evaluation
from bagpipe.schedule.ir.loop_builder import LoopBuilder
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.types.model_inputs import device_of

__all__ = ["Outputs"]


class Outputs(LoopPart):
    """Forward of a model that computes its own loss, without gradients.

    Args:
        model: called as ``model(batch)``, returns ``(loss, outputs)``.

    Attributes:
        outputs: what the model returned beside the loss of the latest batch; None without examples.
        is_dropping: the batches that follow are not scored.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outputs: Any = None
        self.is_dropping = False
        self._model = model
        self._run: LoopRun
        self._loss_sum: Tensor

    def declare(self, loop: LoopBuilder) -> None:
        declare_evaluation(loop)

    def handlers(self) -> Mapping[str, Handler]:
        return {"F": self.forward}

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device_of(self._model))

    def forward(self, b: int) -> None:
        inputs = self._run.in_flight[b].inputs
        self.outputs = None
        if inputs is not None and not self.is_dropping:
            with torch.no_grad():
                loss, self.outputs = call_model(self._model, inputs.batch)
                if inputs.num_examples:  # a mean over none is not finite
                    self._loss_sum += loss * inputs.num_examples

    def loss_sums(self) -> Mapping[str, Tensor]:
        """The sum of the losses so far; see `DensePart.loss_sums`."""
        return {"model": self._loss_sum}
