"""`ChunkedStages`: the stages of a process; parameters, gradients and optimizer state in chunks under a byte budget.

    lane compute<k>   F0 F1 B0 F2 B1 … OPT     moments of each action: units of the stage, gradients, steps
    lane chunks<k>       in   out in           the order of a batch, fixed by the program, repeats: chunks come ahead

Each compute lane has chunks and slots of its own, and a part of the process's budget: its order is known, that of
several lanes among each other is not. The bits are those of `StagedDense`: a gradient is added up where it lies, micro-
batch by micro-batch. What ranks sum leaves its chunk before the sum and comes back with the step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_state import DenseCopy
from bagpipe.dense.chunks.budget import LAST_GRADIENT, Budget, ChunkPlan, Piece, divide_budget, plan_chunks
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.clip import Limited, listed
from bagpipe.errors import InputError
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.prediction import RULES
from bagpipe.pipeline.stage.stage_versions import kinds_of
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.chunked_versions import ChunkedVersions
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
        InputError: two lanes of one process have one stage, several ranks have devices, the budget is too small, or see
            `plan_chunks`.
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
        chunked = {lane.name: lane.chunked for lane in self._lanes_held}
        for name, activations in pipeline.activations.items():
            if name in chunked:
                activations.places = chunked[name].hooks
        for stage, versions in pipeline.versions.items():
            lane = self._held[stage]
            versions.memory = ChunkedVersions(
                versions, lane.chunked, [p for _, p in pipeline.staged.parameters_of(stage)], lane.pieces[stage]
            )
        for share in pipeline.shares.values():
            share.live_apart()

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
        self.rest()  # an earlier run can have been given up
        for share in self.pipeline.shares.values():
            share.adopt()
        super().start(run)
        for lane in self._lanes_held:
            lane.start(run)

    def end(self) -> None:
        self._arrive()
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
        batch, piece = self._run.in_flight[b], lane.stepped_pieces[stage]
        if stage in self._summed:
            lane.chunked.take_back(piece)
        batch.is_reached[stage] = self.pipeline.scale(stage, b, self._stage_batch(b).num_global_examples, ())
        if self._agreement is None or not self.clip.limits_dense or not batch.is_reached[stage]:
            return
        found: dict[nn.Parameter, Tensor] = {}

        def look(parameters: Sequence[nn.Parameter]) -> None:
            self._prepare(stage, b, parameters)
            norms = self.clip.norms(parameters, squares=stage in self.pipeline.shares)
            found.update(zip(parameters, norms, strict=True))

        lane.chunked.measure(look, piece=piece)
        batch.norms[stage] = listed(found, self.pipeline.stepped(stage))

    def update(self, stage: int, b: int, limited: Limited | None) -> None:
        lane, optimizer = self._held.get(stage), self.pipeline.optimizers.get(stage)
        if lane is None or optimizer is None:
            super().update(stage, b, limited)
            return
        versions = self.pipeline.versions.get(stage)
        is_measured = self._agreement is not None and self.clip.limits_dense

        def update(parameters: Sequence[nn.Parameter]) -> None:
            if not is_measured:
                self._prepare(stage, b, parameters)
                self.clip.measure(parameters)
            elif limited is not None:
                self.clip.scale(parameters, limited)
            optimizer.step()
            if versions is not None:
                versions.stepped()

        if versions is not None:
            versions.before_step(b)
        lane.chunked.step(update, piece=lane.stepped_pieces[stage])
        self._stepped(lane, stage, b)

    def _prepare(self, stage: int, b: int, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients of some parameters of a stage become those of the batch."""
        self.pipeline.scale(stage, b, self._stage_batch(b).num_global_examples, parameters)
        self.loss_scale.unscale_parameters(parameters)

    def _stepped(self, lane: _HeldLane, stage: int, b: int) -> None:
        """The step of a stage is made, or left out."""
        if stage in self.pipeline.versions:
            self.pipeline.versions[stage].after_step(b)
        if stage in self.pipeline.shares:
            lane.chunked.settle()
            self.pipeline.shares[stage].copy_share()
            self.pipeline.shares[stage].clear()
        lane.stepped(stage)

    def leave_out(self, stage: int, b: int) -> None:
        lane = self._held.get(stage)
        if lane is None or stage not in self.pipeline.optimizers:
            super().leave_out(stage, b)
            return
        if stage in self.pipeline.versions:
            self.pipeline.versions[stage].before_step(b)
        if not self._run.in_flight[b].is_skipped:
            lane.chunked.follow(lane.stepped_pieces[stage])
        self._stepped(lane, stage, b)

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
            self._arrive(int(chunk))
            lane.chunked.settle()
        return super().capture(streams, chunk, rng=rng, parts=parts)

    def evaluating(self) -> AbstractContextManager[object]:
        self.rest()  # what ranks share is home
        return super().evaluating()

    def rest(self) -> None:
        self._arrive()
        for lane in self._lanes_held:
            lane.chunked.rest()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        for lane in self._lanes_held:
            lane.chunked.keep_averages(averages, decay)
        return True

    def lane_reports(self) -> Mapping[str, LaneReport]:
        found = dict(super().lane_reports())
        for lane in self._lanes_held:
            for name, report in lane.chunked.arena.lane.reports(lane.name).items():
                found[name] = found[name] + report if name in found else report
        return found

    def _arrive(self, *stages: int) -> None:
        """Put the gathered parameters of divided stages into their chunks; of all stages, if none is named."""
        for stage in stages or self.pipeline.shares:
            share = self.pipeline.shares.get(stage)
            if share is not None and share.is_gathered:
                lane = self._held[stage]
                lane.chunked.open(lane.pieces[stage])
                share.arrive()

    def _act(self, lane: _HeldLane, stage: int, number: int, op: str, handler: Handler, index: int) -> None:
        """An action of a stage instance. Its last backward gives out the gradients that ranks sum."""
        units = self._units[number]
        lane.enter(index // units)
        self._arrive(stage)
        share = self.pipeline.shares.get(stage)
        if share is not None and share.level == "parameters":
            handler(index)  # chunks have what is stepped alone
            return
        with lane.chunked.computing() if _ACTIONS[op] else nullcontext():
            handler(index)
        if op in ("B", "W"):
            lane.num_backwards[stage] += 1
            if stage in self._summed and lane.num_backwards[stage] == units:
                lane.chunked.hand_out(lane.pieces[stage])


class _HeldLane:
    """A compute lane and its chunks.

    Attributes:
        name: of the lane.
        stages: with parameters.
        pieces, stepped_pieces: numbers in the chunks of each stage's parameters, and of what is stepped in their place.
        chunked: their chunks.
        num_backwards: by stage, of this batch.

    Args:
        stages: and the number of pieces of each: its parameters, and maybe what is stepped in their place.
        trained: the stages that make steps.
        alternates: forwards of a batch can come in the turn before its backwards.
    """

    def __init__(
        self, name: str, stages: Mapping[int, int], trained: Iterable[int], chunked: ChunkedModel, *, alternates: bool
    ) -> None:
        self._alternates = alternates
        self.name = name
        self.stages = tuple(stages)
        ends = [*itertools.accumulate(stages.values())]
        self.stepped_pieces = {stage: end - 1 for stage, end in zip(stages, ends, strict=True)}
        self.pieces = {stage: end - count for (stage, count), end in zip(stages.items(), ends, strict=True)}
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
        """An action of batch b comes. A lane does one batch, or turn, after the other, with its steps at the end."""
        if self._batch == b or (self._batch is not None and self._trained):
            return
        if self._batch is not None:
            self.chunked.finish()
        self._batch = b
        self.num_backwards.clear()
        self._stepped.clear()
        self.chunked.begin(goes_on=self._alternates)

    def stepped(self, stage: int) -> None:
        """The step of a stage is done; the last one ends the batch."""
        self._stepped.add(stage)
        if self._stepped == self._trained:
            self._batch = None
            self.chunked.finish()


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


def _held_lanes(pipeline: DensePipeline, budget: Budget, streams: Streams) -> tuple[_HeldLane, ...]:
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
        _HeldLane(
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
