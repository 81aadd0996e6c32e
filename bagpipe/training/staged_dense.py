"""`StagedDense`: the dense part in stages, walked action by action.

DensePipeline, StepProgram ──declare_stages──> lanes compute<k>, reduce<p>
StageRuntime ──handlers──> X_EMBED  F B I W REC SEND RECV  X_EMBED_GRAD   REDUCE_GRAD OPT UNSHARD RESHARD per stage

Where a step depends on all stages (a limit of the gradients' norm, batches that can be left out), they agree before it:
X_MEASURE of each stage, X_AGREE of each process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from bagpipe.checkpoint.dense_pieces import Shares
from bagpipe.checkpoint.dense_state import DenseCopy, DenseState
from bagpipe.dense.clip import NO_CLIP, Clip, Limited
from bagpipe.dense.lamb import Lamb
from bagpipe.dense.loss import BCE, Loss
from bagpipe.dense.precision import Precision
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import JobError
from bagpipe.pipeline.free_order import LaneOrder
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.order_log import OrderLog
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stage.batches import StageBatch
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.pipeline.stream import Streams, keep_for_current_stream
from bagpipe.schedule.builders.prefetch_loop import TURN, declare_stages
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.schedule.lowering.stage_lanes import stage_lanes
from bagpipe.training.agreement import Agreement
from bagpipe.training.dense import DensePart, ModelChunk
from bagpipe.training.part import Hook, LoopRun

__all__ = ["StagedDense", "needs_agreement"]


def needs_agreement(clip: Clip, *, skips: bool) -> bool:
    """Whether the step of a stage depends on the gradients of all stages of all ranks.

    Args:
        clip: limits of gradients.
        skips: batches that are not finite are left out.
    """
    return skips or clip.limits_dense


class StagedDense(DensePart):
    """The stages of this process.

    Args:
        pipeline: what this process runs, with its optimizers.
        optimizer: of all parameters of the model; takes over the state of the stages' when a run ends.
        precision: as the stages were prepared.
        loss: of the model's outputs.
        orders: of lanes that choose theirs; None: the schedule has an order.
        skips_nonfinite, clip: see `DensePart`. If they need it (`needs_agreement`), the program of `pipeline` has
            X_AGREE.
        ranks: group of all ranks, for X_AGREE; None: there is one.

    Raises:
        InputError: the loss scale grows where batches are not left out.
    """

    is_staged = True

    def __init__(
        self,
        *,
        pipeline: DensePipeline,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        clip: Clip = NO_CLIP,
        skips_nonfinite: bool = False,
        loss: Loss = BCE,
        orders: OrderLog | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__(
            model=pipeline.staged.model,
            optimizer=optimizer,
            precision=precision,
            skips_nonfinite=skips_nonfinite,
            clip=clip,
        )
        self.pipeline = pipeline
        self.order_log = orders
        self._loss = loss
        self.chunks = {
            str(stage): ModelChunk(
                name=str(stage),
                parameters=tuple(pipeline.staged.parameters_of(stage)),
                tensors=pipeline.names_of(stage),
                optimizer=pipeline.optimizers.get(stage),
            )
            for stage in pipeline.stages
        }
        step, process = pipeline.step, pipeline.process
        self._lanes = stage_lanes(step, process)
        self._embedding = step.embedding_stages[process].number
        self._stage_of = {instance.number: instance.stage for instance in step.instances}
        self._units = step.program.micro_per_batch
        #: Micro-batch of a batch's first forward, by instance: a table may take them in any order.
        self._first_units = {
            template.stage: template.unit
            for templates in reversed([self._lanes.lanes[lane] for lane in step.lanes_of(process)])
            for template in reversed(templates)
            if template.op == "F"
        }
        self.parameters = {
            name: p for stage in range(len(pipeline.staged.stages)) for name, p in pipeline.staged.parameters_of(stage)
        }
        for stage, share in pipeline.shares.items():
            if isinstance(own := pipeline.optimizers[stage], Lamb):
                own.add_up = share.add_up
        self.divided = {
            str(stage): Shares(
                self.model,
                pipeline.optimizers[stage],
                share,
                is_first=share.rank == 0,
                only=pipeline.names_of(stage),
            )
            for stage, share in pipeline.shares.items()
        }
        self._agreement: Agreement | None = None
        if needs_agreement(clip, skips=skips_nonfinite):
            self._agreement = _agreement(pipeline, clip, self.parameters, ranks)
        self.gradient_points = (Point.GRADIENTS, Point.STEP if self._agreement is None else Point.SUMMED)
        self._losses_lock = threading.Lock()
        self._runtime: StageRuntime
        self._loss_before: float = 0.0
        self._next_batch = 0

    @property
    def loss_counters(self) -> tuple[str, ...]:
        return tuple(str(number) for number in self.pipeline.instances)

    def declare(self, loop: LoopBuilder) -> None:
        declare_stages(loop, self.pipeline.step, self.pipeline.process)

    def handlers(self) -> Mapping[str, Handler]:
        step, process = self.pipeline.step, self.pipeline.process
        own: dict[int, int] = {}
        for instance in step.instances:
            if instance.process == process:
                own.setdefault(instance.stage, instance.number)
        sums = step.program.lanes.get(f"reduce{process}", ())
        ops = {"REDUCE_GRAD": self.reduce, "UNSHARD": self.unshard, "RESHARD": self.reshard}
        agreement: dict[str, Handler] = {}
        if self._agreement is not None:
            agreement[f"{self._embedding}X_AGREE"] = self.agree
            agreement |= {f"{number}X_MEASURE": partial(self.measure, stage) for stage, number in own.items()}
        return {
            **self._runtime.handlers(),
            **({TURN: lambda b: None} if self._lanes.paced else {}),
            f"{self._embedding}X_EMBED": partial(self._runtime.embed, self._embedding),
            f"{self._embedding}X_EMBED_GRAD": self.backward_rows,
            **agreement,
            **{f"{number}OPT": partial(self.step, stage) for stage, number in own.items()},
            **{f"{a.stage}{a.op}": partial(ops[a.op], self._stage_of[a.stage]) for a in sums if a.op in ops},
        }

    def row_givers(self, b: int) -> Sequence[bool] | None:
        return self.pipeline.row_givers(b)

    def orders(self) -> Mapping[str, LaneOrder]:
        return {} if self.order_log is None else self.order_log.lanes

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.READ, when="after", call=self._read)

    def start(self, run: LoopRun) -> None:
        super().start(run)
        self._next_batch = run.first_batch
        sums = {int(number): value for number, value in run.carried.get("loss_sums", {}).items() if number.isdecimal()}
        # The stages go on with their own sums where the checkpoint's job had the same ones, else rank 0 has them all.
        is_same = sums.keys() == set(self.pipeline.instances)
        self._loss_before = 0.0 if is_same else run.carried.get("loss_sum", 0.0)
        for versions in self.pipeline.versions.values():
            versions.start(run.first_batch, run.earlier.dense)
        if self.pipeline.partial_backward is not None:
            self.pipeline.partial_backward.earlier = run.earlier.dense
        for activations in self.pipeline.activations.values():
            activations.lane.open(run.trace)
        self.pipeline.parameters.join()  # an earlier run can have been given up
        self._runtime = self.pipeline.runtime(
            self._stage_batch,
            lambda head, logits, targets: self._loss.of_head(head, logits.reshape(-1), targets),
            label_shape=self._loss.target_shape,
            loss_sums=sums if is_same else {},
            loss_scale=lambda: self.loss_scale.value,
            can_leave_out=self.skips_nonfinite,
            earlier=run.earlier.masks,
        )
        self.pipeline.parameters.begin(self._runtime)

    def backward_rows(self, b: int) -> None:
        """The gradients of all micro-batches reach the rows."""
        self._runtime.embed_grad(self._embedding, b)
        self.loss_scale.unscale_rows(self._run.in_flight[b].groups)

    def reduce(self, stage: int, b: int) -> None:
        """The stage's gradients become those of the whole global batch."""
        self._runtime.sum_pipes(stage)
        self.pipeline.reduce(stage, b)

    def unshard(self, stage: int, index: int) -> None:
        """The stage has its parameters, of which each holder has a share, or has stepped one."""
        self.pipeline.unshard(stage, index)

    def reshard(self, stage: int, index: int) -> None:
        """The stage's whole parameters are not needed before their next UNSHARD."""
        self.pipeline.reshard(stage)

    def measure(self, stage: int, b: int) -> None:
        """X_MEASURE: the stage's gradients are as its optimizer takes them, but for a limit of their norm."""
        batch = self._run.in_flight[b]
        batch.is_reached[stage] = self.pipeline.scale(stage, b, self._stage_batch(b).num_global_examples)
        parameters = [*self.pipeline.stepped(stage)] if batch.is_reached[stage] else []
        if parameters:
            self.loss_scale.unscale_parameters(parameters)
            if self._agreement is not None:
                for parameter in parameters:
                    if parameter.grad is not None:
                        keep_for_current_stream(parameter.grad)  # of the lane that sums gradients
            if self.clip.limits_dense or self.clip.value:
                batch.norms[stage] = self.clip.norms(parameters, squares=stage in self.pipeline.shares)

    def agree(self, b: int) -> None:
        """X_AGREE: whether any process has found the batch bad, and the norms of the gradients of all stages."""
        assert self._agreement is not None, "the program has X_AGREE"
        batch = self._run.in_flight[b]
        for norms in batch.norms.values():
            keep_for_current_stream(norms)
        num_bad, norms = self._agreement.reach(is_bad=batch.is_skipped, norms=batch.norms)
        if self.skips_nonfinite:
            batch.is_skipped = bool(num_bad.item())
        if self.clip.limits_dense:
            batch.all_norms = norms.to(next(iter(self.parameters.values())).dtype).unbind()

    def step(self, stage: int, b: int) -> None:
        """OPT of a batch, or nothing if all leave it out."""
        batch = self._run.in_flight[b]
        if self._agreement is None:
            self.measure(stage, b)
        if batch.is_skipped:
            self.leave_out(stage, b)
            for number in self.pipeline.instances:
                if self._stage_of[number] == stage:
                    self._runtime.runner(number).restore(b)
            return
        for norm in batch.all_norms:
            keep_for_current_stream(norm)
        limited = self.limited(batch.all_norms, batch)
        if batch.is_reached[stage]:
            self.update(stage, b, limited)
        else:  # no micro-batch had a backward here
            self.leave_out(stage, b)

    def update(self, stage: int, b: int, limited: Limited | None) -> None:
        """Step the stage's optimizer with the gradients of a batch, measured before, under their limit."""
        if limited is not None:
            self.clip.scale(self.pipeline.stepped(stage), limited)
        self.pipeline.optimize(stage, b)

    def leave_out(self, stage: int, b: int) -> None:
        """The stage keeps its parameters, and forgets the gradients of a batch."""
        self.pipeline.optimize(stage, b, is_left_out=True)

    def finish_batch(self, b: int) -> None:
        super().finish_batch(b)
        if self.skips_nonfinite:
            for number in self.pipeline.instances:
                self._runtime.runner(number).settle(b, is_left_out=self._run.in_flight[b].is_skipped)
        self._next_batch = b + 1

    def loss_sums(self, before: int | None = None) -> Mapping[str, Tensor]:
        in_flight = self._run.in_flight
        found = self._runtime.loss_sums(
            self._next_batch if before is None else before, lambda b: b in in_flight and in_flight[b].is_skipped
        )
        sums = {str(number): value for number, value in found.items()}
        if self._loss_before:
            first = next(iter(sums))
            sums[first] = sums[first] + self._loss_before
        return sums

    def starts(self, key: OpKey, index: int) -> tuple[str, str, int] | None:
        number = key[0]
        b, unit = divmod(index, self._units[number])
        return (str(self._stage_of[number]), str(number), b) if unit == self._first_units[number] else None

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        if point is Point.GRADIENTS:
            return ()
        stage = self._stage_of[key[0]]
        parameters = self.chunks[str(stage)].parameters
        if stage in self.pipeline.shares:
            return self.pipeline.shares[stage].checked()
        return ((name, parameter.grad) for name, parameter in parameters if parameter.grad is not None)

    def checked_losses(self, point: Point, key: OpKey, b: int) -> Iterable[Tensor]:
        # At its step a stage has computed all its losses, and at the gradients of rows most stages have.
        stages = None if point is Point.GRADIENTS else {self._stage_of[key[0]]}
        for number in self.pipeline.instances:
            losses = self._runtime.runner(number).unchecked
            if stages is None or self._stage_of[number] in stages:
                with self._losses_lock:  # lanes look at the same time
                    found = [losses.popleft()[1] for _ in range(sum(batch <= b for batch, _ in tuple(losses)))]
                for loss in found:
                    keep_for_current_stream(loss)
                yield from found

    def stepped(self) -> Iterable[tuple[str, Tensor]]:
        for stage in self.pipeline.stages:
            names = (name for name, _ in self.chunks[str(stage)].parameters)
            yield from zip(names, self.pipeline.stepped(stage), strict=True)

    def chunk_of(self, key: OpKey) -> ModelChunk | None:
        return self.chunks[str(self._stage_of[key[0]])]

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        versions = self.pipeline.versions.get(int(chunk))
        return {} if versions is None else versions.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for versions in self.pipeline.versions.values():
            versions.load(tensors)

    def capture(
        self, streams: Streams, chunk: str, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]
    ) -> DenseCopy:
        if chunk in self.divided:
            return self.divided[chunk].capture(streams, rng=rng, parts=parts)
        return super().capture(streams, chunk, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        own = {name: part for shares in self.divided.values() for name, part in shares.own.items()}
        state.restore(self.model, *self.pipeline.optimizers.values(), own=own)

    def evaluating(self) -> AbstractContextManager[object]:
        return self.pipeline.parameters.whole()

    def end(self) -> None:
        self.pipeline.parameters.join()
        self.pipeline.adopt(self.optimizer)

    def close(self) -> None:
        for activations in self.pipeline.activations.values():
            activations.lane.close()

    def lane_reports(self) -> Mapping[str, LaneReport]:
        found: dict[str, LaneReport] = {}
        for lane, activations in self.pipeline.activations.items():
            found |= activations.lane.reports(lane)
        return found

    def _read(self, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.stage_batch = self.pipeline.batch(batch.inputs, batch.rank_batch.num_global_examples)

    def _stage_batch(self, b: int) -> StageBatch:
        batch = self._run.in_flight[b].stage_batch
        assert batch is not None, "read before"
        return batch


def _agreement(
    pipeline: DensePipeline, clip: Clip, parameters: Mapping[str, nn.Parameter], ranks: RankGroup | None
) -> Agreement:
    staged, mesh, rank = pipeline.staged, pipeline.mesh, 0 if ranks is None else ranks.rank
    if ranks is None and mesh.world_size > 1:
        raise JobError(f"{mesh.world_size} ranks agree on a batch, but no group leads to them")
    stages = range(len(staged.stages))
    measured = {} if not clip.limits_dense else {n: [name for name, _ in staged.parameters_of(n)] for n in stages}
    return Agreement(
        measured,
        [name for name, _ in staged.model.named_parameters() if name in parameters],
        gives=[stage for stage in pipeline.stages if mesh.holders(stage)[0] == rank],
        divided=[stage for stage in stages if pipeline.is_divided and len(mesh.holders(stage)) > 1],
        device=pipeline.device,
        group=ranks,
    )
