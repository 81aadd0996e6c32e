"""A chain of two stages of equal layers, both as `StagedModel` and for torch.distributed.pipelining, and its batches.

dense ──stage 0: layers──> hidden ──stage 1: layers, logit──> loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bagpipe.distributed.interface import StageLinks
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.runner import EndOfBatches
from bagpipe.pipeline.stage.runtime import StageBatch, StageRuntime
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Resource
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.stage_lanes import lane_templates
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.split.staged_model import StagedModel, StageModule, StageValue
from bagpipe.types.model_inputs import ModelInputs

__all__ = ["Process", "Workload", "loss_sum", "make_step"]

NUM_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes.

    Attributes:
        name: for the table.
        width: of every layer.
        layers: per stage.
        examples: per batch.
        microbatches: per batch.
        steps: per timed block.
    """

    name: str
    width: int
    layers: int
    examples: int
    microbatches: int
    steps: int

    def module(self, stage: int) -> nn.Module:
        """A stage for torch: one tensor in, one tensor out."""
        torch.manual_seed(stage)
        layers: list[nn.Module] = []
        for _ in range(self.layers):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers, *([nn.Linear(self.width, 1)] if stage == NUM_STAGES - 1 else []))

    def inputs(self) -> ModelInputs:
        generator = torch.Generator().manual_seed(0)
        return ModelInputs(
            dense=torch.randn(self.examples, self.width, generator=generator),
            sparse=None,
            labels=torch.randint(2, (self.examples,), generator=generator).float(),
        )

    @property
    def message_shape(self) -> tuple[int, int]:
        return self.examples // self.microbatches, self.width

    def staged(self) -> StagedModel:
        def value(name: str, producer: int, consumers: tuple[int, ...], shape: tuple[int, ...]) -> StageValue:
            return StageValue(
                name=name,
                producer=producer,
                consumers=consumers,
                shape=shape,
                dtype=torch.float32,
                wants_grad=name == "hidden",
            )

        stages = (
            StageModule(name="bottom", module=_Tuple(self.module(0)), inputs=(0,), outputs=(1,)),
            StageModule(name="top", module=_Tuple(self.module(1)), inputs=(1,), outputs=(2,), heads=((0, 2),)),
        )
        values = (
            value("dense", NUM_STAGES, (0,), (self.width,)),
            value("hidden", 0, (1,), (self.width,)),
            value("logits", 1, (), (1,)),
        )
        model = nn.ModuleList([stage.module for stage in stages])
        return StagedModel(model=model, embedding=_Dense(), stages=stages, values=values)


class _Tuple(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Tensor) -> tuple[Tensor]:
        return (self.module(value),)


class _Dense(nn.Module):
    """An embedding stage without rows."""

    def forward(self, dense: Tensor, sparse: object) -> tuple[Tensor]:
        return (dense,)


def loss_sum(head: int, logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits.reshape(-1), labels, reduction="sum")


def make_step(workload: Workload, schedule: str, num_processes: int = NUM_STAGES) -> StepProgram:
    staged = workload.staged()
    graph = staged.graph(workload.microbatches)
    return step_program(graph, staged.embedding_edges, schedule, num_processes=num_processes)


class Process:
    """The stages of one process in our runner, and their training loop. The optimizer step only drops gradients.

    Args:
        workload: sizes.
        step: its program.
        process: its number.
        links: to the other process.
        on_step: called when the process has finished a batch.
    """

    def __init__(
        self,
        workload: Workload,
        step: StepProgram,
        *,
        process: int,
        links: StageLinks | None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.step = step
        self.process = process
        self.staged = workload.staged()
        self._source = step.embedding_stages[process].number
        self._on_step = on_step
        inputs = workload.inputs() if step.embedding_stages[process].pipes else None
        given = StageBatch(inputs=inputs, num_examples=workload.examples, num_global_examples=workload.examples)
        self.runtime = StageRuntime(
            self.staged,
            step,
            process=process,
            links=links,
            batch=lambda number: given,
            loss=loss_sum,
            dtype=torch.float32,
            device="cpu",
            seed=0,
        )

    def handlers(self) -> dict[str, Handler]:
        """Handlers of all actions except X_READ."""
        found: dict[str, Handler] = {
            **self.runtime.handlers(),
            f"{self._source}X_EMBED": partial(self.runtime.embed, self._source),
            f"{self._source}X_EMBED_GRAD": partial(self.runtime.embed_grad, self._source),
        }
        own = {instance.stage for instance in self.step.instances if instance.process == self.process}
        for stage in own:
            found[f"{stage}OPT"] = partial(self._finish, stage, stage == max(own))
        return found

    def handlers_of(self, num_batches: int) -> Mapping[str, Handler]:
        """The same, with an X_READ that ends after `num_batches`."""

        def read(batch: int) -> None:
            if batch >= num_batches:
                raise EndOfBatches

        return {**self.handlers(), "X_READ": read}

    def _finish(self, stage: int, is_last: bool, batch: int) -> None:
        if is_last:
            self._on_step()
        for parameter in self.runtime.parameters(stage)[0]:
            parameter.grad = None

    def loop(self) -> Loop:
        """The process's lanes, and a reading lane."""
        lanes = {lane: lane_templates(self.step, lane) for lane in self.step.lanes_of(self.process)}
        performed = {template.key for templates in lanes.values() for template in templates}
        performed |= {(stage, half) for stage, op in performed if op == "B" for half in "IW"}
        edges = [e for e in self.step.program.edges if e.src_key in performed and e.dst_key in performed]
        read = (self._source, "X_READ")
        edges.append(Edge(src="X_READ", src_stage=self._source, dst="X_EMBED", dst_stage=self._source))
        edges += [
            Edge(src=op, src_stage=stage, dst="X_READ", dst_stage=self._source, delay=3, kind="capacity")
            for stage, op in (templates[-1].key for templates in lanes.values())
        ]
        return Loop(
            lanes={"data": (Template(op="X_READ", stage=self._source),), **lanes},
            source=read,
            sink=(self._source, "X_EMBED_GRAD"),
            edges=tuple(edges),
            stages=self.step.program.stages,
            resources=tuple(Resource(name=lane) for lane in ("data", *lanes)),
        )
