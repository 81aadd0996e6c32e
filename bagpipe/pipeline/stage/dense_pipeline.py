"""`DensePipeline`: one rank's part of a dense pipeline: its stages, their optimizers, and links to other ranks.

rank = replica * num_processes + process        a replica runs the whole pipeline; replicas split the examples
StagedModel, StepProgram ──Mesh of W ranks──> ranks that hold each stage, examples that each rank reads
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.distributed.interface import StageLinks
from bagpipe.errors import InputError
from bagpipe.oracle.assign import share_bounds
from bagpipe.pipeline.stage.activations import LaneActivations
from bagpipe.pipeline.stage.batches import StageBatch
from bagpipe.pipeline.stage.partial_backward import PartialBackward
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.pipeline.stage.stage_parameters import StageParameters
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.pipeline.stream import Streams, keep_for_current_stream
from bagpipe.schedule.ir.backward_shares import BackwardShares
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.split.staged_model import StagedModel

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["DensePipeline", "Mesh", "held_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks of a job as replicas of a pipeline.

    Attributes:
        step: the pipeline of one replica.
        world_size: number of ranks.

    Raises:
        InputError: the number of ranks is not a multiple of the replica's processes.
    """

    step: StepProgram
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size % self.step.num_processes:
            raise InputError(
                f"pipeline.schedule {self.step.schedule} with {self.step.graph.num_stages} stages: the number of ranks "
                f"must be 1 or a multiple of {self.step.num_processes}, got {self.world_size}"
            )

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.step.num_processes

    @property
    def example_shares(self) -> tuple[int, ...]:
        """Share of the examples by rank: the number of pipes that start on it. Empty if all shares are equal."""
        shares = tuple(len(embedding.pipes) for embedding in self.step.embedding_stages) * self.num_replicas
        return () if len(set(shares)) == 1 else shares

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(replica, process) of a rank."""
        return divmod(rank, self.step.num_processes)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage, ascending."""
        processes = {instance.process for instance in self.step.instances if instance.stage == stage}
        return tuple(
            replica * self.step.num_processes + process
            for replica in range(self.num_replicas)
            for process in sorted(processes)
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, ascending."""
        process = self.coordinates(rank)[1]
        return tuple(sorted({instance.stage for instance in self.step.instances if instance.process == process}))

    def examples(self, replica: int, num_global_examples: int) -> tuple[int, int]:
        """First and end of the examples of a batch that a replica trains on."""
        bounds = share_bounds(num_global_examples, self.example_shares or (1,) * self.world_size)
        first = replica * self.step.num_processes
        return bounds[first], bounds[first + self.step.num_processes]


def held_stages(staged: StagedModel, mesh: Mesh) -> tuple[HeldStage, ...]:
    """Ranks, parameters and buffers of each stage, for gradient sums and for broadcasting the model."""
    return tuple(
        HeldStage(
            holders=mesh.holders(number),
            parameters=tuple(staged.parameters_of(number)),
            buffers=tuple(stage.module.buffers()),
        )
        for number, stage in enumerate(staged.stages)
    )


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

    Attributes:
        stages: the stages of this rank, ascending.
        optimizers: optimizer per local stage; of the segments if the stage is divided.
        shares, device: as given.
        versions: weights kept per local stage of an asynchronous schedule.
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
    ) -> None:
        self.staged = staged
        self.mesh = mesh
        self.step = mesh.step
        self.replica, self.process = mesh.coordinates(rank)
        self.stages = mesh.stages_of(rank)
        self.links = links
        self.shares = shares
        self._reduce = reduce
        self._dtype = dtype
        self.device = device
        self._seed = seed
        ops = {atom.op for atom in self.step.program.atoms()}
        self.parameters = StageParameters(staged, self.stages, shares, are_divided="RESHARD" in ops)
        self.optimizers: Mapping[int, torch.optim.Optimizer] = {
            stage: make_optimizer(parameters) for stage in self.stages if (parameters := [*self.stepped(stage)])
        }
        self.versions: Mapping[int, StageVersions] = {
            stage: StageVersions(
                self.step.version_lags[stage],
                tuple(staged.parameters_of(stage)),
                optimizer,
                alternates=bool(self.step.turns),
                recomputes="REC" in ops,
            )
            for stage, optimizer in self.optimizers.items()
            if self.step.version_lags
        }
        self.partial_backward: PartialBackward | None = None
        if backward_shares is not None:
            self.partial_backward = PartialBackward(
                backward_shares,
                self.step,
                replica=self.replica,
                num_replicas=mesh.num_replicas,
                examples=mesh.examples,
            )
        self.activations: Mapping[str, LaneActivations] = {}
        if host_activations is not None:
            self.activations = {
                lane: LaneActivations(
                    lane.replace("compute", "activations"),
                    self.step.program.lanes[lane],
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
        loss_scale: float = 1.0,
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
            versions=self.versions,
            activations=self.activations,
            saving=self.parameters.saving,
            partial_backward=self.partial_backward,
        )

    def stepped(self, stage: int) -> Iterator[nn.Parameter]:
        """What the optimizer of a local stage steps."""
        segments = self.shares[stage].segments if stage in self.shares else {}
        return (segments.get(name, parameter) for name, parameter in self.staged.parameters_of(stage))

    def reduce(self, stage: int, batch: int) -> None:
        """Sum a stage's gradients of a batch over the ranks that hold it; they are complete on this rank."""
        share = self.shares.get(stage)
        if share is not None:
            for _, parameter in self.staged.parameters_of(stage):
                if parameter.grad is not None:
                    keep_for_current_stream(parameter.grad)  # it can be freed before this lane has copied it
            share.reduce()
        elif self._reduce is not None:
            self._reduce(stage, self._givers(stage, batch))

    def scale(
        self, stage: int, batch: int, num_global_examples: int, parameters: Iterable[nn.Parameter] | None = None
    ) -> bool:
        """Make the sum of a stage's gradients their mean over the examples whose backward reached it, on all ranks.

        Args:
            stage: the stage.
            batch: number of the batch.
            num_global_examples: of the batch.
            parameters: only the gradients of these, a part of the stage's; None: of all.

        Returns:
            Whether any did; the stage has a gradient.
        """
        if self.partial_backward is None:
            return True
        factor = self.partial_backward.factor(stage, batch, num_global_examples)
        own = (p for _, p in self.staged.parameters_of(stage)) if parameters is None else parameters
        gradients = [p.grad for p in own if p.grad is not None]
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

    def unshard(self, stage: int) -> None:
        """Gather a stage's parameters if it is divided: after the steps of all holders, or before computations."""
        if stage in self.shares:
            self.shares[stage].gather()

    def reshard(self, stage: int) -> None:
        """Release a stage's whole parameters, if they are divided."""
        if stage in self.shares:
            self.shares[stage].release()

    def optimize(self, stage: int, batch: int) -> None:
        """One dense optimizer step of a stage, for a batch."""
        optimizer = self.optimizers.get(stage)
        if optimizer is not None:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    # The gradient can belong to the lane that sums gradients, which continues during the step.
                    keep_for_current_stream(parameter.grad)
            versions = self.versions.get(stage)
            if versions is not None:
                versions.before_step(batch)
            optimizer.step()
            if versions is not None:
                versions.stepped()
                versions.after_step(batch)
            optimizer.zero_grad(set_to_none=True)
            if stage in self.shares:
                self.shares[stage].clear()

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
