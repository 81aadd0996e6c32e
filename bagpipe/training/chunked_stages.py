"""`ChunkedStages`: the stages of a process; parameters, gradients and optimizer state in chunks under a byte budget.

    lane compute<k>   F0 F1 B0 F2 B1 … OPT     moments of each action: units of the stage, gradients, steps
    lane chunks<k>       in   out in           the order of a batch, fixed by the program, repeats: chunks come ahead

Each compute lane has chunks and slots of its own, and a part of the process's budget: its order is known, that of
several lanes among each other is not. The bits are those of `StagedDense`: a gradient is added up where it lies, micro-
batch by micro-batch. What ranks sum leaves its chunk before the sum and comes back with the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.checkpoint.dense_state import DenseCopy
from bagpipe.dense.chunks.budget import Budget, ChunkPlan, Piece, divide_budget, plan_chunks
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.clip import Limited
from bagpipe.errors import InputError
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.part import LoopRun
from bagpipe.training.staged_dense import StagedDense

__all__ = ["ChunkedStages"]

#: Actions of an instance -> whether it is a forward with a backward.
_ACTIONS = {"F": True, "REC": True, "B": False, "I": False, "W": False}


class ChunkedStages(StagedDense):
    """The stages of this process, under a budget.

    Args:
        budget: of the device.
        streams: of the stages' device.
        settings: of `StagedDense`.

    Raises:
        InputError: the schedule keeps versions of weights or has two instances of a stage in one process, several ranks
            have devices, the budget of some rank is too small, or see `plan_chunks`.
    """

    def __init__(self, *, budget: Budget, streams: Streams, **settings: Any) -> None:
        super().__init__(**settings)
        pipeline = self.pipeline
        _check(pipeline, streams)
        step = pipeline.step
        sums = step.program.lanes.get(f"reduce{pipeline.process}", ())
        self._summed = {self._stage_of[action.stage] for action in sums if action.op == "REDUCE_GRAD"}
        self._lanes_held = _held_lanes(pipeline, budget, streams)
        self._held = {stage: lane for lane in self._lanes_held for stage in lane.stages}

    def handlers(self) -> Mapping[str, Handler]:
        found = dict(super().handlers())
        for instance in self.pipeline.step.instances:
            lane = self._held.get(instance.stage)
            if lane is None or instance.process != self.pipeline.process:
                continue
            for op in _ACTIONS:
                text = f"{instance.number}{op}"
                if text in found:
                    found[text] = partial(self._act, lane, instance.stage, instance.number, op, found[text])
        return found

    def start(self, run: LoopRun) -> None:
        super().start(run)
        for lane in self._lanes_held:
            lane.start(run)

    def end(self) -> None:
        for lane in self._lanes_held:
            lane.chunked.end()
        super().end()

    def close(self) -> None:
        super().close()
        for lane in self._lanes_held:
            lane.chunked.close()

    def measure(self, stage: int, b: int) -> None:
        lane = self._held.get(stage)
        if lane is None or stage not in self.pipeline.optimizers:
            super().measure(stage, b)
            return
        batch, piece = self._run.in_flight[b], lane.stages.index(stage)
        batch.is_reached[stage] = True
        if stage in self._summed:
            lane.chunked.take_back(piece)
        if self._agreement is None or not self.clip.norm:
            return
        found: dict[nn.Parameter, Tensor] = {}

        def look(parameters: Sequence[nn.Parameter]) -> None:
            self.loss_scale.unscale_parameters(parameters)
            found.update(zip(parameters, self.clip.norms(parameters), strict=True))

        lane.chunked.measure(look, piece=piece)
        none = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        batch.norms[stage] = torch.stack([found.get(each, none) for _, each in self.chunks[str(stage)].parameters])

    def update(self, stage: int, b: int, limited: Limited | None) -> None:
        lane, optimizer = self._held.get(stage), self.pipeline.optimizers.get(stage)
        if lane is None or optimizer is None:
            super().update(stage, b, limited)
            return
        is_measured = self._agreement is not None and self.clip.norm > 0

        def update(parameters: Sequence[nn.Parameter]) -> None:
            if not is_measured:
                self.loss_scale.unscale_parameters(parameters)
                self.clip.measure(parameters)
            elif limited is not None:
                self.clip.scale(parameters, limited)
            optimizer.step()

        lane.chunked.step(update, piece=lane.stages.index(stage))
        lane.stepped(stage)

    def leave_out(self, stage: int, b: int) -> None:
        lane = self._held.get(stage)
        if lane is None:
            super().leave_out(stage, b)
        else:
            lane.stepped(stage)

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        stage = self._stage_of.get(key[0], -1)  # an embedding stage has none
        if point is Point.GRADIENTS or stage not in self._held or stage in self._summed:
            return super().checked_gradients(point, key)
        marks = self._held[stage].chunked.marks
        return ((name, marks[name]) for name, _ in self.chunks[str(stage)].parameters if name in marks)

    def capture(
        self, streams: Streams, chunk: str, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]
    ) -> DenseCopy:
        lane = self._held.get(int(chunk))
        if lane is not None:
            lane.chunked.settle()
        return super().capture(streams, chunk, rng=rng, parts=parts)

    def evaluating(self) -> AbstractContextManager[object]:
        self.rest()  # what ranks share is home
        return super().evaluating()

    def rest(self) -> None:
        for lane in self._lanes_held:
            lane.chunked.rest()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        for lane in self._lanes_held:
            lane.chunked.keep_averages(averages, decay)
        return True

    def lane_reports(self) -> Mapping[str, LaneReport]:
        found: dict[str, LaneReport] = {}
        for lane in self._lanes_held:
            found |= lane.chunked.arena.lane.reports(lane.name)
        return found

    def _act(self, lane: _HeldLane, stage: int, number: int, op: str, handler: Handler, index: int) -> None:
        """An action of a stage instance. Its last backward gives out the gradients that ranks sum."""
        units = self._units[number]
        lane.enter(index // units)
        with lane.chunked.computing() if _ACTIONS[op] else nullcontext():
            handler(index)
        if op in ("B", "W"):
            lane.num_backwards[stage] += 1
            if stage in self._summed and lane.num_backwards[stage] == units:
                lane.chunked.hand_out(lane.stages.index(stage))


class _HeldLane:
    """A compute lane and its chunks.

    Attributes:
        name: of the lane.
        stages: with parameters, in the order of their pieces.
        chunked: their chunks.
        num_backwards: by stage, of this batch.
    """

    def __init__(self, name: str, stages: Sequence[int], trained: Iterable[int], chunked: ChunkedModel) -> None:
        self.name = name
        self.stages = tuple(stages)
        self.chunked = chunked
        self.num_backwards: Counter[int] = Counter()
        self._trained = frozenset(trained)
        self._batch: int | None = None
        self._stepped: set[int] = set()

    def start(self, run: LoopRun) -> None:
        """A run begins."""
        self._batch = None
        self.chunked.start(run.trace)

    def enter(self, b: int) -> None:
        """An action of batch b comes. A lane does one batch after the other."""
        if self._batch == b:
            return
        if self._batch is not None:
            self.chunked.finish()
        self._batch = b
        self.num_backwards.clear()
        self._stepped.clear()
        self.chunked.begin()

    def stepped(self, stage: int) -> None:
        """The step of a stage is done; the last one ends the batch."""
        self._stepped.add(stage)
        if self._stepped == self._trained:
            self._batch = None
            self.chunked.finish()


def _check(pipeline: DensePipeline, streams: Streams) -> None:
    step = pipeline.step
    setting = f"dense.budget_bytes is not possible with pipeline.schedule {step.schedule}"
    if step.version_lags:
        raise InputError(f"{setting}: it keeps versions of weights")
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


def _held_lanes(pipeline: DensePipeline, budget: Budget, streams: Streams) -> tuple[_HeldLane, ...]:
    """The lanes of this process whose stages have parameters. Every rank checks the budget of all ranks."""
    step = pipeline.step
    found: list[tuple[str, tuple[int, ...], ChunkPlan, int]] = []
    for process in range(step.num_processes):
        plans: list[tuple[str, tuple[int, ...], ChunkPlan]] = []
        for lane in step.lanes_of(process):
            stages = [each.stage for each in step.instances if f"compute{each.position}" == lane]
            pieces = {stage: piece for stage in stages if (piece := _piece(pipeline, stage)).parameters}
            if pieces:
                plan = plan_chunks([*pieces.values()], budget, whole=pipeline.staged.model)
                plans.append((lane, tuple(pieces), plan))
        shares = divide_budget(budget, [plan for _, _, plan in plans])
        if process == pipeline.process:
            found = [(*own, num_bytes) for own, num_bytes in zip(plans, shares, strict=True)]
    return tuple(
        _HeldLane(
            name,
            stages,
            [stage for stage in stages if stage in pipeline.optimizers],
            ChunkedModel(plan, num_bytes, streams, name=name.replace("compute", "chunks")),
        )
        for name, stages, plan, num_bytes in found
    )


def _piece(pipeline: DensePipeline, stage: int) -> Piece:
    module = pipeline.staged.stages[stage].module
    own = {id(parameter) for parameter in module.parameters()}
    named = {name: each for name, each in pipeline.staged.model.named_parameters() if id(each) in own}
    # Of another rank's stage only the kind of its optimizer counts, which is that of all.
    optimizer = pipeline.optimizers.get(stage, next(iter(pipeline.optimizers.values()), None))
    return Piece(module=module, parameters=named, optimizer=optimizer)
