"""`Mesh`: ranks of a job as replicas of a pipeline: who holds which stage, and reads which examples.

rank = replica * num_processes + process        a replica runs the whole pipeline; replicas split the examples
"""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.errors import InputError
from bagpipe.oracle.assign import share_bounds
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.split.staged_model import StagedModel

__all__ = ["Mesh", "held_stages"]


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
