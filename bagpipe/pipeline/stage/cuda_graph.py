"""`CudaGraphExecutor`: captures forward, loss and backward of the dense stage once, and replays them.

    embedding(inputs) ──values──> RecordedStage: stage, loss ─────> loss, loss sum
                      labels ──>                gradients <─ loss scale ──> parameters' in `grad`; embedding's backward

The lookups stay outside the capture, with the row kernels. Every full batch is replayed; the last, smaller one runs
operator by operator. So whether a batch is replayed depends on its size alone.

Outputs of a replay are valid until the next replay. With several ranks, row gradients travel while the next batch is
computed, so they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from bagpipe.dense.executor import DensePass, heads_of, leaves_of, pass_on, split_pass, values_of
from bagpipe.dense.loss import BCE, Loss
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.pipeline.stage.recorded_stage import GraphCapture, RecordedMicroBatch, StageRecordings, check_recordable
from bagpipe.split.staged_model import StagedModel

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["CudaGraphExecutor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecordedPass:
    """A batch whose forward is enqueued."""

    recorded: RecordedMicroBatch
    values: Sequence[Tensor]
    leaves: Sequence[Tensor]
    copies: bool

    @property
    def loss(self) -> Tensor:
        return self.recorded.shown[0]

    @property
    def loss_sum(self) -> Tensor:
        return self.recorded.shown[1]

    def backward(self) -> None:
        self.recorded.backward_inputs(lends=not self.copies)
        self.recorded.backward_weights(lends=True)
        pass_on(self.values, self.leaves)


class CudaGraphExecutor:
    """See above.

    Args:
        staged: the model as an embedding stage and one stage, whose forward draws no random numbers.
        precision: what it computes in.
        capture: how the stage is recorded.
        copies: gradients of values must outlive the next batch's forward.
        loss: of the logits.

    Raises:
        InputError: the model draws random numbers.
    """

    def __init__(
        self,
        staged: StagedModel,
        precision: Precision,
        capture: GraphCapture,
        *,
        copies: bool,
        loss: Loss = BCE,
    ) -> None:
        check_recordable(staged)
        self.precision = precision
        self._staged = staged
        self._copies = copies
        self._loss = loss
        self._full_batch = capture.full_batch
        self._recordings = StageRecordings(capture, self._compute, module=staged.stages[0].module)

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        values = values_of(self._staged, inputs)
        if num_global_examples != self._full_batch:
            return split_pass(self._staged, values, inputs.labels, num_global_examples, loss_scale, self._loss)
        leaves = leaves_of(values)
        recorded = self._recordings.forward([*leaves, inputs.labels], loss_scale.value)
        return _RecordedPass(recorded=recorded, values=values, leaves=leaves, copies=self._copies)

    def _compute(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        *values, labels = inputs
        total = self._loss.total(heads_of(self._staged, values), labels)
        loss = total / self._full_batch
        return (loss, total), (loss,)
