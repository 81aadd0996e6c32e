"""Training with the dense part in stages: rows and updates as ever, the stages' own actions in the compute lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bagpipe.dense.loss import summed_loss
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.stage.batches import StageBatch
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.step_program import StageInstance
from bagpipe.schedule.lowering.pipelined import pipelined
from bagpipe.training.phase import WRITE_DEPTH
from bagpipe.training.training import Training, TrainingOfRanks

if TYPE_CHECKING:
    from bagpipe.training.engine import Engine

__all__ = ["PipelinedTraining", "PipelinedTrainingOfRanks"]

#: Ops of the frame that the stages replace.
_REPLACED = ("F", "B", "OPT")


class PipelinedTraining(Training):
    """All lanes of the pipeline in one process."""

    def __init__(
        self,
        engine: Engine,
        batches: Iterator[RankBatch],
        *,
        first_batch: int = 0,
        carried: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(engine, batches, first_batch=first_batch, carried=carried)
        assert engine.pipeline is not None, "one stage trains without"
        self.pipeline: DensePipeline = engine.pipeline
        self.batches: dict[int, StageBatch] = {}
        self.runtime: StageRuntime = self.pipeline.runtime(
            self.batches.__getitem__,
            self.head_loss,
            before_batch=self.before_batch,
            loss_sums=self._instance_sums(carried),
            loss_scale=self.loss_scale.value,
        )

    def loop(self) -> Loop:
        return pipelined(super().loop(), self.pipeline.step, self.pipeline.process, read_ahead=self.read_ahead)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        step, process = self.pipeline.step, self.pipeline.process
        embedding = step.embedding_stages[process].number
        frame = {op: handler for op, handler in super().handlers().items() if op not in _REPLACED}
        own = {instance.stage: instance.number for instance in reversed(step.instances) if instance.process == process}
        steps = {f"{number}OPT": partial(self.optimize, stage) for stage, number in own.items()}
        sums = {f"{number}REDUCE_GRAD": partial(self.reduce, stage) for stage, number in own.items()}
        return {
            **frame,
            **self.runtime.handlers(),
            f"{embedding}X_EMBED": partial(self.pool, embedding),
            f"{embedding}X_EMBED_GRAD": partial(self.unpool, embedding),
            **steps,
            **({name: handler for name, handler in sums.items() if self._has_lane(name)}),
        }

    def read(self, b: int) -> None:
        super().read(b)
        self.batches.pop(b - self.read_ahead - WRITE_DEPTH - 1, None)
        flight = self.in_flight[b]
        self.batches[b] = self.pipeline.batch(flight.inputs, flight.rank_batch.num_global_examples)

    def pool(self, embedding: int, b: int) -> None:
        self.begin(self.in_flight[b].context)
        self.runtime.pool(embedding, b)

    def unpool(self, embedding: int, b: int) -> None:
        self.runtime.unpool(embedding, b)
        current = self.cache.current
        groups = () if current is None else current.groups
        self.loss_scale.unscale_rows(groups)
        self.guard.is_bad(b, groups=groups)

    def before_batch(self, instance: StageInstance, b: int, loss_sum: Tensor) -> None:
        self.recorder.before_instance(instance.stage, instance.number, b, loss_sum)

    def optimize(self, stage: int, b: int) -> None:
        self.guard.is_bad(b, parameters=self.pipeline.staged.parameters_of(stage))
        self.loss_scale.unscale_parameters(parameter for _, parameter in self.pipeline.staged.parameters_of(stage))
        self.pipeline.optimize(stage)

    def head_loss(self, head: int, logits: Tensor, labels: Tensor) -> Tensor:
        """Every output of the model is taken for logits of the labels."""
        return summed_loss(logits.reshape(-1), labels)

    def reduce(self, stage: int, b: int) -> None:
        """The stage's gradients become those of the whole global batch."""
        self.runtime.sum_pipes(stage)
        if self.pipeline.reduce is not None:
            self.pipeline.reduce(stage)

    def total_loss(self) -> Tensor:
        return self.loss_sum + self.runtime.loss_sum()

    def instance_sums(self) -> Mapping[int, Tensor]:
        return self.runtime.loss_sums()

    def _instance_sums(self, carried: Mapping[str, Any]) -> Mapping[int, float]:
        """What the instances go on counting from: their own sums, where the checkpoint's job had the same instances."""
        sums = {int(instance): value for instance, value in carried.get("loss_sums", {}).items()}
        if sums.keys() == set(self.pipeline.instances):
            self.loss_sum.zero_()
            return sums
        return {}

    def _has_lane(self, text: str) -> bool:
        actions = self.pipeline.step.program.lanes.get(f"reduce{self.pipeline.process}", ())
        return any(text == f"{action.stage}{action.op}" for action in actions)


class PipelinedTrainingOfRanks(PipelinedTraining, TrainingOfRanks):
    """The pipeline's lanes, and rows, in many processes."""
