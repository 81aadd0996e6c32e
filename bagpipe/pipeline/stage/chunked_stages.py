"""Stages whose parameters, gradients and optimizer state lie in chunks under a byte budget of the device.

    lane compute<k>   F0 F1 B0 F2 B1 … OPT     moments of each action: units of the stage, gradients, steps
    lane chunks<k>       in   out in           the order of a batch, fixed by the program, repeats: chunks come ahead

Each compute lane has chunks and slots of its own, and a part of the process's budget: its order is known, that of
several lanes among each other is not. The bits are those without chunks: a gradient is added up where it lies, micro-
batch by micro-batch. What ranks sum leaves its chunk before the sum and comes back with the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.dense.chunks.budget import LAST_GRADIENT, Budget, ChunkPlan, Piece, divide_budget, plan_chunks
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.clip import NO_CLIP, Clip, Limited, Prepare, listed
from bagpipe.errors import InputError
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stage.chunk_lane import ChunkLane
from bagpipe.pipeline.stage.chunked_versions import ChunkedVersions
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.prediction import RULES
from bagpipe.pipeline.stage.stage_versions import kinds_of
from bagpipe.pipeline.stage.stage_weights import StageWeights
from bagpipe.pipeline.stream import Streams

__all__ = ["ChunkedStageWeights", "chunk_stages"]

#: Actions of an instance -> whether it is a forward with a backward.
_ACTIONS = {"F": True, "REC": True, "B": False, "I": False, "W": False}


def chunk_stages(pipeline: DensePipeline, budget: Budget, streams: Streams) -> None:
    """Put the stages of this rank into chunks, one lane's apart from another's (`DensePipeline.chunk_lanes`).

    Args:
        pipeline: its weights become `ChunkedStageWeights`.
        budget: of the device.
        streams: of the stages' device.

    Raises:
        InputError: two lanes of one process have one stage, several ranks have devices, the budget is too small, or see
            `plan_chunks`.
    """
    _check(pipeline, streams)
    step = pipeline.step
    stage_of = {instance.number: instance.stage for instance in step.instances}
    sums = step.program.lanes.get(f"reduce{pipeline.process}", ())
    summed = {stage_of[action.stage] for action in sums if action.op == "REDUCE_GRAD"}
    pipeline.chunk_lanes = _chunk_lanes(pipeline, budget, streams)
    for lane in pipeline.chunk_lanes:
        if lane.name in pipeline.activations:
            pipeline.activations[lane.name].places = lane.chunked.hooks
        for stage in lane.stages:
            pipeline.weights[stage] = ChunkedStageWeights(
                pipeline.weights[stage], lane, units=step.program.micro_per_batch, is_summed=stage in summed
            )


class ChunkedStageWeights(StageWeights):
    """The weights of a stage, in chunks of its lane.

    Args:
        whole: the weights.
        lane: of the stage.
        units: micro-batches of a batch, by instance.
        is_summed: holders sum the gradients.
    """

    def __init__(self, whole: StageWeights, lane: ChunkLane, *, units: Mapping[int, int], is_summed: bool) -> None:
        super().__init__(
            whole.stage,
            whole.parameters,
            optimizer=whole.optimizer,
            share=whole.share,
            versions=whole.versions,
            sums=whole.sums,
        )
        self._lane = lane
        self._units = units
        self._is_summed = is_summed
        self._piece = lane.pieces[self.stage]
        self._stepped_piece = lane.stepped_pieces[self.stage]
        self._prepare: Prepare | None = None  # of gradients that are prepared in the step
        if self.versions is not None:
            parameters = [parameter for _, parameter in self.parameters]
            self.versions.memory = ChunkedVersions(self.versions, lane.chunked, parameters, self._piece)
        if self.share is not None:
            self.share.live_apart()

    def acting(self, number: int, op: str, handler: Handler) -> Handler:
        return partial(self._act, op, self._units[number], handler)

    def _act(self, op: str, units: int, handler: Handler, index: int) -> None:
        """An action of an instance. The stage's last backward gives out the gradients that ranks sum."""
        lane = self._lane
        lane.enter(index // units)
        self.arrive()
        if self.share is not None and self.share.level == "parameters":
            handler(index)  # chunks have what is stepped alone
            return
        with lane.chunked.computing() if _ACTIONS[op] else nullcontext():
            handler(index)
        if op in ("B", "W"):
            lane.num_backwards[self.stage] += 1
            if self._is_summed and lane.num_backwards[self.stage] == units:
                lane.chunked.hand_out(self._piece)

    def arrive(self) -> None:
        """Put gathered parameters of a divided stage into their chunks."""
        if self.share is not None and self.share.is_gathered:
            self._lane.chunked.open(self._piece)
            self.share.arrive()

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        if self._is_summed or self.optimizer is None:
            return super().gradients()
        marks = self._lane.chunked.marks
        return ((name, marks[name]) for name, _ in self.parameters if name in marks)

    def show(self, wanted: Container[str], prepare: Prepare) -> None:
        if self._is_summed:
            super().show(wanted, prepare)
        else:
            shown = {parameter for name, parameter in self.parameters if name in wanted}
            self._lane.chunked.show(shown, prepare, piece=self._stepped_piece)

    def take_shown(self, wanted: Container[str]) -> None:
        if self._is_summed:
            super().take_shown(wanted)
        else:
            self._lane.chunked.take_shown([parameter for name, parameter in self.parameters if name in wanted])

    def measure(self, prepare: Prepare, clip: Clip) -> Tensor | None:
        if self.optimizer is None:
            return super().measure(prepare, clip)
        if self._is_summed:
            self._lane.chunked.take_back(self._stepped_piece)
        if not clip.limits_dense:
            self._prepare = prepare
            return None
        found: dict[nn.Parameter, Tensor] = {}

        def look(parameters: Sequence[nn.Parameter]) -> None:
            prepare(parameters)
            norms = clip.norms(parameters, squares=self.share is not None)
            found.update(zip(parameters, norms, strict=True))

        self._lane.chunked.measure(look, piece=self._stepped_piece)
        return listed(found, self.stepped)

    def step(self, b: int, clip: Clip = NO_CLIP, limited: Limited | None = None) -> None:
        optimizer, versions = self.optimizer, self.versions
        if optimizer is None:
            return
        prepare, self._prepare = self._prepare, None

        def update() -> None:
            optimizer.step()
            if versions is not None:
                versions.stepped()

        if versions is not None:
            versions.before_step(b)
        self._lane.chunked.step_limited(update, clip, limited, prepare=prepare, piece=self._stepped_piece)
        self._end(b)

    def leave_out(self, b: int, *, is_skipped: bool) -> None:
        self._prepare = None
        if self.optimizer is None:
            return
        if self.versions is not None:
            self.versions.before_step(b)
        if not is_skipped:
            self._lane.chunked.follow(self._stepped_piece)
        self._end(b)

    def _end(self, b: int) -> None:
        """The step of batch b is made, or left out."""
        if self.versions is not None:
            self.versions.after_step(b)
        if self.share is not None:
            self._lane.chunked.settle()
            self.share.copy_share()
            self.share.clear()
        self._lane.stepped(self.stage)

    def settle(self) -> None:
        self.arrive()
        self._lane.chunked.settle()


def _check(pipeline: DensePipeline, streams: Streams) -> None:
    step = pipeline.step
    setting = f"dense.budget_bytes is not possible with pipeline.schedule {step.schedule}"
    if pipeline.mesh.world_size > 1 and streams.is_async:
        raise InputError(
            "chunks of the dense part are not possible on several ranks with CUDA devices: use run.device cpu"
        )
    for process in range(step.num_processes):
        stages = [instance.stage for instance in step.instances if instance.process == process]
        twice = sorted({stage for stage in stages if stages.count(stage) > 1})
        if twice:
            raise InputError(
                f"{setting} on {pipeline.mesh.world_size} ranks: two lanes of one process use the weights of stage "
                f"{twice[0]}, expected one; use {len({each.position for each in step.instances})} ranks or a multiple"
            )


def _chunk_lanes(pipeline: DensePipeline, budget: Budget, streams: Streams) -> tuple[ChunkLane, ...]:
    """The lanes of this process whose stages have parameters.

    Every rank checks the budget of all ranks, so that all refuse it; where parameters are divided, its own alone.
    """
    step = pipeline.step
    knows_all = all(share.level != "parameters" for share in pipeline.shares.values())
    found: list[tuple[str, Mapping[int, int], ChunkPlan, int]] = []
    for process in range(step.num_processes) if knows_all else (pipeline.process,):
        plans: list[tuple[str, Mapping[int, int], ChunkPlan]] = []
        for lane in step.lanes_of(process):
            stages = [each.stage for each in step.instances if f"compute{each.position}" == lane]
            own = {stage: pieces for stage in stages if (pieces := _pieces(pipeline, stage))[0].parameters}
            if own:
                flat = [piece for pieces in own.values() for piece in pieces]
                plan = plan_chunks(flat, budget, whole=pipeline.staged.model)
                plans.append((lane, {stage: len(pieces) for stage, pieces in own.items()}, plan))
        shares = divide_budget(budget, [plan for _, _, plan in plans])
        if process == pipeline.process:
            found = [(*each, num_bytes) for each, num_bytes in zip(plans, shares, strict=True)]
    return tuple(
        ChunkLane(
            name,
            stages,
            [stage for stage in stages if stage in pipeline.optimizers],
            ChunkedModel(plan, num_bytes, streams, name=name.replace("compute", "chunks")),
            alternates=bool(step.turns),
        )
        for name, stages, plan, num_bytes in found
    )


def _pieces(pipeline: DensePipeline, stage: int) -> list[Piece]:
    """The parameters of a stage; of a divided one this rank's segments besides, which are stepped in their place."""
    whole, share = _piece(pipeline, stage), pipeline.shares.get(stage)
    if share is None:
        return [whole]
    own = Piece(module=whole.module, parameters=share.segments, optimizer=whole.optimizer)
    return [own] if share.level == "parameters" else [dataclasses.replace(whole, optimizer=None), own]


def _piece(pipeline: DensePipeline, stage: int) -> Piece:
    module = pipeline.staged.stages[stage].module
    own = {id(parameter) for parameter in module.parameters()}
    named = {name: each for name, each in pipeline.staged.model.named_parameters() if id(each) in own}
    # Of another rank's stage only the kind of its optimizer counts, which is that of all.
    optimizer = pipeline.optimizers.get(stage, next(iter(pipeline.optimizers.values()), None))
    versions = _versions_of(pipeline, stage, optimizer) if any(p.requires_grad for p in named.values()) else ()
    return Piece(module=module, parameters=named, optimizer=optimizer, versions=versions)


def _versions_of(pipeline: DensePipeline, stage: int, optimizer: Optimizer | None) -> tuple[str, ...]:
    """Names of what a stage of an asynchronous schedule keeps beside its newest weights."""
    step = pipeline.step
    if not step.version_lags or optimizer is None:
        return ()
    lags, recomputes = step.version_lags[stage], any(atom.op == "REC" for atom in step.program.atoms())
    kinds = kinds_of(lags, alternates=bool(step.turns), recomputes=recomputes)
    predicts = lags.predicts_forward or lags.predicts_backward
    rule = RULES[type(optimizer)] if predicts else None
    keeps = rule is not None and any(rule.needs_gradient(group) for group in optimizer.param_groups)
    return (*kinds, *([LAST_GRADIENT] if keeps else []))
