"""`DensePipeline`: one rank's part of a dense pipeline: its stages, their optimizers, and links to other ranks.

rank = replica * num_processes + process        a replica runs the whole pipeline; replicas split the examples
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.distributed.interface import StageLinks
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stage.activations import LaneActivations
from bagpipe.pipeline.stage.batches import StageBatch
from bagpipe.pipeline.stage.chunk_lane import ChunkLane
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.pipeline.stage.partial_backward import PartialBackward
from bagpipe.pipeline.stage.recorded_stage import GraphCapture, check_recordable
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.pipeline.stage.stage_parameters import StageParameters
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.pipeline.stage.stage_weights import StageWeights
from bagpipe.pipeline.stream import Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.backward_shares import BackwardShares
from bagpipe.schedule.lowering.stage_lanes import lane_templates
from bagpipe.split.staged_model import StagedModel

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["DensePipeline"]


class DensePipeline:
    """One rank's part of the dense pipeline.

    Args:
        staged: the model.
        mesh: all ranks.
        rank: this rank.
        make_optimizer: makes an optimizer for a list of parameters.
        links: links to the other processes of the replica; None for a single process.
        reduce: sums a stage's gradients over the ranks that hold it, and says which of them have any (None: all); None
            if only this rank holds it.
        shares: this rank's shares of the stages that are divided among the ranks that hold them.
        dtype, device: of the dense part.
        seed: seed of dropout.
        host_activations: streams by which activations move to the host and back; None: they stay on the device.
        backward_shares: which backwards are left out; None: none.
        capture: how stages are recorded; None: they run operator by operator.

    Attributes:
        stages: the stages of this rank, ascending.
        weights: of each local stage.
        chunk_lanes: lanes whose stages lie in chunks (`chunk_stages`); empty: they stay where they are.
        shares, device: as given.
        is_divided: stages that several ranks hold are divided among them.
        activations: compute lane -> what moves its activations; empty: they stay on the device.
        partial_backward: of this replica; None: no backward is left out.
        parameters: which of them are here.
    """

    def __init__(
        self,
        *,
        staged: StagedModel,
        mesh: Mesh,
        rank: int,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        links: StageLinks | None = None,
        reduce: Callable[[int, Collection[int] | None], None] | None = None,
        shares: Mapping[int, StageShare] = MappingProxyType({}),
        host_activations: Streams | None = None,
        backward_shares: BackwardShares | None = None,
        capture: GraphCapture | None = None,
    ) -> None:
        self.staged = staged
        self.mesh = mesh
        self.step = mesh.step
        self.replica, self.process = mesh.coordinates(rank)
        self.stages = mesh.stages_of(rank)
        self.links = links
        self.shares = shares
        self._dtype = dtype
        self.device = device
        self._seed = seed
        ops = {atom.op for atom in self.step.program.atoms()}
        self.is_divided = "UNSHARD" in ops
        self.parameters = StageParameters(staged, self.stages, shares, are_divided="RESHARD" in ops)
        self.weights: dict[int, StageWeights] = {
            stage: self._weights(stage, make_optimizer, reduce) for stage in self.stages
        }
        self.chunk_lanes: Sequence[ChunkLane] = ()
        self.partial_backward: PartialBackward | None = None
        if backward_shares is not None:
            self.partial_backward = PartialBackward(
                backward_shares,
                self.step,
                replica=self.replica,
                num_replicas=mesh.num_replicas,
                examples=mesh.examples,
            )
        self._capture = capture
        if capture is not None:
            check_recordable(staged)
            split = frozenset(atom.stage for atom in self.step.program.atoms() if atom.op == "I")
            self._capture = dataclasses.replace(capture, split=split)
        self.activations: Mapping[str, LaneActivations] = {}
        if host_activations is not None:
            self.activations = {
                lane: LaneActivations(
                    lane.replace("compute", "activations"),
                    lane_templates(self.step, lane),
                    self.step.program.micro_per_batch,
                    streams=host_activations,
                )
                for lane in self.step.lanes_of(self.process)
            }

    def batch(self, inputs: ModelInputs | None, num_global_examples: int) -> StageBatch:
        """A batch for the runtime.

        Args:
            inputs: inputs of the examples that this rank reads; None if it reads none.
            num_global_examples: examples of all ranks.
        """
        first, end = self.mesh.examples(self.replica, num_global_examples)
        return StageBatch(
            inputs=inputs, num_examples=end - first, num_global_examples=num_global_examples, first_example=first
        )

    @cached_property
    def instances(self) -> tuple[int, ...]:
        """The instances of this process."""
        return tuple(instance.number for instance in self.step.instances if instance.process == self.process)

    def names_of(self, stage: int) -> frozenset[str]:
        """Names of a stage's parameters and buffers in the whole model.

        The first local stage includes the tensors that belong to no stage.
        """
        model = self.staged.model
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        own = _tensors_of(self.staged.stages[stage].module)
        found = {name for name, tensor in named if id(tensor) in own}
        if stage == self.stages[0]:
            staged = set().union(*(_tensors_of(each.module) for each in self.staged.stages))
            found |= {name for name, tensor in named if id(tensor) not in staged}
        return frozenset(found)

    def runtime(
        self,
        batch: Callable[[int], StageBatch],
        loss: Callable[[int, Tensor, Tensor], Tensor],
        *,
        loss_sums: Mapping[int, float] = MappingProxyType({}),
        label_shape: tuple[int, ...] = (),
        loss_scale: Callable[[], float] = lambda: 1.0,
        can_leave_out: bool = False,
        earlier: int = 0,
    ) -> StageRuntime:
        """The runtime of one phase; see `StageRuntime`. The stages are whole here."""
        return StageRuntime(
            self.staged,
            self.step,
            process=self.process,
            links=self.links,
            batch=batch,
            loss=loss,
            dtype=self._dtype,
            device=self.device,
            seed=self._seed,
            earlier=earlier,
            loss_sums=loss_sums,
            label_shape=label_shape,
            loss_scale=loss_scale,
            can_leave_out=can_leave_out,
            versions=self.versions,
            activations=self.activations,
            places=self.parameters.places,
            partial_backward=self.partial_backward,
            capture=self._capture,
        )

    @property
    def optimizers(self) -> Mapping[int, torch.optim.Optimizer]:
        """Optimizer of each local stage that has something to step; of the segments if the stage is divided."""
        return {stage: own.optimizer for stage, own in self.weights.items() if own.optimizer is not None}

    @property
    def versions(self) -> Mapping[int, StageVersions]:
        """Weights kept of each local stage of an asynchronous schedule."""
        return {stage: own.versions for stage, own in self.weights.items() if own.versions is not None}

    def _weights(
        self,
        stage: int,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        sums: Callable[[int, Collection[int] | None], None] | None,
    ) -> StageWeights:
        parameters, share = tuple(self.staged.parameters_of(stage)), self.shares.get(stage)
        segments = {} if share is None else share.segments
        stepped = [segments.get(name, parameter) for name, parameter in parameters]
        optimizer = make_optimizer(stepped) if stepped else None
        versions = None
        if optimizer is not None and self.step.version_lags:
            has_twins = sum(each.stage == stage for each in self.step.instances if each.process == self.process) > 1
            versions = StageVersions(
                self.step.version_lags[stage],
                parameters,
                optimizer,
                share=share,
                alternates=bool(self.step.turns),
                recomputes=has_twins or any(atom.op == "REC" for atom in self.step.program.atoms()),
            )
        return StageWeights(stage, parameters, optimizer=optimizer, share=share, versions=versions, sums=sums)

    def reduce(self, stage: int, batch: int) -> None:
        """Sum a stage's gradients of a batch over the ranks that hold it; they are complete on this rank."""
        self.weights[stage].reduce(self._givers(stage, batch))

    def scale(self, stage: int, batch: int, num_global_examples: int, parameters: Iterable[nn.Parameter]) -> bool:
        """Make sums of a stage's gradients their mean over the examples whose backward reached it, on all ranks.

        Args:
            stage: the stage.
            batch: its number.
            num_global_examples: examples of all ranks.
            parameters: that have the gradients.

        Returns:
            Whether any did; the stage has a gradient.
        """
        if self.partial_backward is None:
            return True
        factor = self.partial_backward.factor(stage, batch, num_global_examples)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if factor not in (None, 1) and gradients:
            torch._foreach_mul_(gradients, factor)
        return factor is not None

    def row_givers(self, batch: int) -> Sequence[bool] | None:
        """By rank, whether the backward of a batch reaches rows of its examples; None: all do."""
        partial = self.partial_backward
        if partial is None:
            return None
        giving = [stage for stage, wants_grad in self.staged.embedding_edges if wants_grad]
        found = []
        for rank in range(self.mesh.world_size):
            replica, process = self.mesh.coordinates(rank)
            pipes = self.step.embedding_stages[process].pipes
            found.append(any(partial.gives(stage, batch, replica, pipes) for stage in giving))
        return found

    def _givers(self, stage: int, batch: int) -> Collection[int] | None:
        """The ranks with gradients of a stage in a batch; None: all that hold it."""
        partial = self.partial_backward
        if partial is None:
            return None
        found = []
        for rank in self.mesh.holders(stage):
            replica, process = self.mesh.coordinates(rank)
            pipes = {i.pipe for i in self.step.instances if i.stage == stage and i.process == process}
            if partial.gives(stage, batch, replica, sorted(pipes)):
                found.append(rank)
        return found

    def recover(self) -> None:
        """Before a run: the model is whole, and everything is home. An earlier run can have been given up.

        Raises:
            PeerError: a stage is divided, and a peer is gone or silent.
        """
        self.rest()
        for share in self.shares.values() if self.chunk_lanes else ():
            share.adopt()
        self.parameters.join()

    def open_lanes(self, trace: Trace | None) -> None:
        """The lanes that copy beside the compute lanes begin.

        Args:
            trace: records the copies.
        """
        for activations in self.activations.values():
            activations.lane.open(trace)
        for lane in self.chunk_lanes:
            lane.start(trace)

    def rest(self) -> None:
        """Between two batches: nothing moves parameters."""
        for weights in self.weights.values():
            weights.arrive()
        for lane in self.chunk_lanes:
            lane.chunked.rest()

    def end(self) -> None:
        """After a run: the model is whole, and everything is home."""
        for weights in self.weights.values():
            weights.arrive()
        for lane in self.chunk_lanes:
            lane.chunked.end()
        self.parameters.join()

    def close(self) -> None:
        """End the threads of the lanes that copy."""
        for activations in self.activations.values():
            activations.lane.close()
        for lane in self.chunk_lanes:
            lane.chunked.close()

    def lane_reports(self) -> Mapping[str, LaneReport]:
        """See `LoopPart.lane_reports`."""
        found: dict[str, LaneReport] = {}
        for name, activations in self.activations.items():
            found |= activations.lane.reports(name)
        for lane in self.chunk_lanes:
            for name, report in lane.chunked.arena.lane.reports(lane.name).items():
                found[name] = found[name] + report if name in found else report
        return found

    def adopt(self, whole: torch.optim.Optimizer) -> None:
        """Copy the optimizer state of this rank's stages to an optimizer of the whole model. All ranks call it.

        Raises:
            PeerError: a stage is divided, and a peer is gone or silent.
        """
        for stage, optimizer in self.optimizers.items():
            share = self.shares.get(stage)
            whole.state.update(optimizer.state if share is None else share.whole_states(optimizer))


def _tensors_of(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
