"""`StagedDense`: the dense part in stages, walked action by action.

DensePipeline, StepProgram ──declare_stages──> lanes compute<k>, reduce<p>
StageRuntime ──handlers──> X_EMBED  F B I W REC SEND RECV  X_EMBED_GRAD   REDUCE_GRAD OPT UNSHARD RESHARD per stage

Where a step depends on all stages (a limit of the gradients' norm, batches that can be left out), they agree before it:
X_MEASURE of each stage, X_AGREE of each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from bagpipe.training.agreement import Agreement, agreement_of, needs_agreement
from bagpipe.training.dense import DensePart, ModelChunk
from bagpipe.training.part import Hook, LoopRun
from bagpipe.training.preconditioning import LayersAt, Preconditioning
from bagpipe.training.stage_layers import layers_at
from bagpipe.training.stage_losses import StageLosses

__all__ = ["StagedDense"]


class StagedDense(DensePart):
    """The stages of this process.

    Args:
        pipeline: what this process runs, with its optimizers.
        optimizer: of all parameters of the model; takes over the state of the stages' when a run ends.
        precision: as the stages were prepared.
        loss: of the model's outputs.
        orders: of lanes that choose theirs; None: the schedule has an order.
        skips_nonfinite, clip, preconditioning: see `DensePart`. If it is needed (`needs_agreement`), the program of
            `pipeline` has X_AGREE.
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
        preconditioning: Preconditioning | None = None,
    ) -> None:
        super().__init__(
            model=pipeline.staged.model,
            optimizer=optimizer,
            precision=precision,
            skips_nonfinite=skips_nonfinite,
            clip=clip,
            preconditioning=preconditioning,
        )
        self.pipeline = pipeline
        self.order_log = orders
        self._loss = loss
        self.chunks = {
            (name := str(stage)): ModelChunk(
                name=name,
                parameters=own.parameters,
                tensors=pipeline.names_of(stage),
                optimizer=own.optimizer,
                counters=tuple(str(n) for n in pipeline.instances if pipeline.step.instances[n].stage == stage),
            )
            for stage, own in pipeline.weights.items()
        }
        step, process = pipeline.step, pipeline.process
        self._lanes = stage_lanes(step, process)
        self._embedding = step.embedding_stages[process].number
        self._stage_of = {instance.number: instance.stage for instance in step.instances}
        self._units = step.program.micro_per_batch
        self._first_units = {  # micro-batch of a batch's first forward, by instance: a table may take any order
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
            self._agreement = agreement_of(pipeline, clip, self.parameters, ranks)
        self.gradient_points = (Point.GRADIENTS, Point.STEP if self._agreement is None else Point.SUMMED)
        self._runtime: StageRuntime
        self._losses: StageLosses
        self._next_batch = 0

    @property
    def loss_counters(self) -> tuple[str, ...]:
        return tuple(str(number) for number in self.pipeline.instances)

    def declare(self, loop: LoopBuilder) -> None:
        declare_stages(loop, self.pipeline.step, self.pipeline.process)

    def handlers(self) -> Mapping[str, Handler]:
        step, process = self.pipeline.step, self.pipeline.process
        own = {self._stage_of[number]: number for number in reversed(self.pipeline.instances)}
        sums = step.program.lanes.get(f"reduce{process}", ())
        weights = self.pipeline.weights
        ops: Mapping[str, Callable[[int, int], None]] = {
            "REDUCE_GRAD": self.reduce,
            "UNSHARD": lambda stage, index: weights[stage].unshard(index),
            "RESHARD": lambda stage, index: weights[stage].reshard(),
        }
        agreement: dict[str, Handler] = {}
        if self._agreement is not None:
            agreement = {f"{number}X_MEASURE": partial(self.measure, stage) for stage, number in own.items()}
            agreement[f"{self._embedding}X_AGREE"] = self.agree
        computing = dict(self._runtime.handlers())
        for number in self.pipeline.instances:
            for op in (op for op in ("F", "REC", "B", "I", "W") if f"{number}{op}" in computing):
                handler = computing[f"{number}{op}"]
                if self.preconditioning is not None and op in ("F", "REC"):
                    handler = self.preconditioning.capturing(str(number), handler)
                computing[f"{number}{op}"] = weights[self._stage_of[number]].acting(number, op, handler)
        return {
            **computing,
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
        self.pipeline.recover()
        super().start(run)
        self._next_batch = run.first_batch
        self._losses = StageLosses({number: self._stage_of[number] for number in self.pipeline.instances}, run.carried)
        for versions in self.pipeline.versions.values():
            versions.start(run.first_batch, run.earlier.dense)
        if self.pipeline.partial_backward is not None:
            self.pipeline.partial_backward.earlier = run.earlier.dense
        self._runtime = self.pipeline.runtime(
            self._stage_batch,
            lambda head, logits, targets: self._loss.of_head(head, logits.reshape(-1), targets),
            label_shape=self._loss.target_shape,
            loss_sums=self._losses.initial,
            loss_scale=lambda: self.loss_scale.value,
            can_leave_out=self.skips_nonfinite,
            earlier=run.earlier.masks,
        )
        self._losses.follow(self._runtime)
        self.pipeline.parameters.begin(self._runtime)
        if self.preconditioning is not None:
            places = layers_at(self.pipeline, self._runtime, self.preconditioning.kfacs)
            self.preconditioning.attach(self, places)
        self.pipeline.open_lanes(run.trace)

    def backward_rows(self, b: int) -> None:
        """The gradients of all micro-batches reach the rows."""
        self._runtime.embed_grad(self._embedding, b)
        self.scale_of(b).unscale_rows(self._run.in_flight[b].groups)

    def reduce(self, stage: int, b: int) -> None:
        """The stage's gradients become those of the whole global batch."""
        self._runtime.sum_pipes(stage)
        self.pipeline.reduce(stage, b)
        if (kfac := self._kfac(stage)) is not None and stage in self.pipeline.shares:
            self.pipeline.shares[stage].show(kfac.layers)

    def measure(self, stage: int, b: int) -> None:
        """X_MEASURE: the stage's gradients are as its optimizer takes them, but for a limit of their norm."""
        if self._kfac(stage) is not None:
            return  # PRECOND has done it
        batch = self._run.in_flight[b]
        batch.is_reached[stage] = self._prepare(stage, b, ())
        if batch.is_reached[stage]:
            norms = self.pipeline.weights[stage].measure(partial(self._prepare, stage, b), self.clip)
            if norms is not None:
                batch.norms[stage] = norms

    def _prepare(self, stage: int, b: int, parameters: Sequence[nn.Parameter]) -> bool:
        """Some gradients of a stage become means without the loss scale. Returns whether the stage has any."""
        for parameter in parameters:
            if parameter.grad is not None:
                keep_for_current_stream(parameter.grad)  # of the lane that sums gradients
        is_reached = self.pipeline.scale(stage, b, self._stage_batch(b).num_global_examples, parameters)
        self.scale_of(b).unscale_parameters(parameters)
        return is_reached

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
        limited = self.limited(batch.all_norms, batch)
        if batch.is_reached[stage]:
            self.update(stage, b, limited)
        else:  # no micro-batch had a backward here
            self.leave_out(stage, b)

    def update(self, stage: int, b: int, limited: Limited | None) -> None:
        """Step the stage's optimizer with the gradients of a batch, measured before, under their limit."""
        weights, kfac = self.pipeline.weights[stage], self._kfac(stage)
        if kfac is not None:
            kfac.limit(str(stage), float(self.pipeline.optimizers[stage].param_groups[0]["lr"]))
            weights.take_shown(kfac.layers)
            weights.measure(lambda parameters: None, self.clip)
        weights.step(b, self.clip, limited)

    def leave_out(self, stage: int, b: int) -> None:
        """The stage keeps its parameters, and forgets the gradients of a batch."""
        if (kfac := self._kfac(stage)) is not None:
            kfac.leave_out(str(stage), b)
        self.pipeline.weights[stage].leave_out(b, is_skipped=self._run.in_flight[b].is_skipped)

    def num_examples(self, at: LayersAt, index: int) -> int:
        """See `Preconditioned`."""
        return self._runtime.runner(int(at.prefix)).num_examples(index)

    def is_left_out(self, b: int) -> bool:
        """See `Preconditioned`. The stages agree after the work of K-FAC, which is undone then."""
        return False

    def show_gradients(self, chunk: str, b: int, names: frozenset[str]) -> None:
        """See `Preconditioned`."""
        stage = int(chunk)
        self._run.in_flight[b].is_reached[stage] = self._prepare(stage, b, ())
        self.pipeline.weights[stage].show(names, partial(self._prepare, stage, b))

    def finish_batch(self, b: int) -> None:
        super().finish_batch(b)
        if self.skips_nonfinite:
            for number in self.pipeline.instances:
                self._runtime.runner(number).settle(b, is_left_out=self._run.in_flight[b].is_skipped)
        self._next_batch = b + 1

    def loss_sums(self, before: int | None = None) -> Mapping[str, Tensor]:
        in_flight = self._run.in_flight
        before = self._next_batch if before is None else before
        return self._losses.sums(before, lambda b: b in in_flight and in_flight[b].is_skipped)

    def counted(self, number: int, b: int) -> Tensor:
        """See `StageRunner.counted`, of an instance of this process."""
        return self._runtime.runner(number).counted(b)

    def starts(self, key: OpKey, index: int) -> tuple[str, str, int] | None:
        number = key[0]
        b, unit = divmod(index, self._units[number])
        return (str(self._stage_of[number]), str(number), b) if unit == self._first_units[number] else None

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        if point is Point.GRADIENTS:
            return ()
        return self.pipeline.weights[self._stage_of[key[0]]].gradients()

    def checked_losses(self, point: Point, key: OpKey, b: int) -> Iterable[Tensor]:
        # At its step a stage has computed all its losses, and at the gradients of rows most stages have.
        return self._losses.unexamined(b, None if point is Point.GRADIENTS else self._stage_of[key[0]])

    def stepped(self) -> Iterable[tuple[str, Tensor]]:
        for weights in self.pipeline.weights.values():
            yield from zip((name for name, _ in weights.parameters), weights.stepped, strict=True)

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
        self.pipeline.weights[int(chunk)].settle()
        if chunk in self.divided:
            return self.divided[chunk].capture(streams, rng=rng, parts=parts)
        return super().capture(streams, chunk, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        own = {name: part for shares in self.divided.values() for name, part in shares.own.items()}
        state.restore(self.model, *self.pipeline.optimizers.values(), own=own)

    def evaluating(self) -> AbstractContextManager[object]:
        self.rest()  # what ranks share is home
        return self.pipeline.parameters.whole()

    def rest(self) -> None:
        self.pipeline.rest()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        for lane in self.pipeline.chunk_lanes:
            lane.chunked.keep_averages(averages, decay)
        return bool(self.pipeline.chunk_lanes)

    def end(self) -> None:
        self.pipeline.end()
        self.pipeline.adopt(self.optimizer)

    def close(self) -> None:
        self.pipeline.close()

    def lane_reports(self) -> Mapping[str, LaneReport]:
        return self.pipeline.lane_reports()

    def _kfac(self, stage: int) -> Preconditioning | None:
        """K-FAC of a stage with linear layers; None: its plain gradients are stepped with."""
        kfac = self.preconditioning
        return kfac if kfac is not None and str(stage) in kfac.kfacs else None

    def _read(self, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.stage_batch = self.pipeline.batch(batch.inputs, batch.rank_batch.num_global_examples)

    def _stage_batch(self, b: int) -> StageBatch:
        batch = self._run.in_flight[b].stage_batch
        assert batch is not None, "read before"
        return batch
