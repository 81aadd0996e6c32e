"""`StepProgram`: one batch of dense stages as executed. Every (stage, pipe, part) is a numbered stage instance.

    StageGraph, schedule ──builder──> Program ──step_program──> StepProgram ──stage_lanes──> StageLanes of one process

Every process has an embedding stage. It holds the embedding rows of the examples that the process reads, hands inputs
to dense stages and labels to the loss, and takes back the gradients of the pooled vectors. A process where no pipe
begins reads no examples; its embedding stage only takes part in the row exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.ir.version_lags import VersionLags

__all__ = ["EmbeddingStage", "StageInstance", "StepProgram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInstance:
    """One stage of one pipe, or a part of it, and where it runs.

    Attributes:
        number: stage number in the program that runs.
        stage: number in the stage graph.
        pipe: its pipe.
        position: pipeline rank whose lane runs it.
        process: position of the process in the replica (0 if one process runs all).
        part, parts: which part of each micro-batch it takes, of how many, where the stage has replicas of its own.
    """

    number: int
    stage: int
    pipe: int
    position: int
    process: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingStage:
    """The stage of a process that holds embedding rows and reads examples.

    Attributes:
        number: stage number in the program that runs.
        pipes: pipes that begin in the process, in the order in which they share its examples.
        process: position of the process in the replica.
        position: pipeline rank whose lane runs it.
    """

    number: int
    pipes: tuple[int, ...]
    process: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """One batch of all processes of a replica.

    Attributes:
        graph: the stages.
        schedule: its name.
        program: lanes ``compute0``, ``compute1``, … by pipeline rank, and ``reduce0``, … by process if several ranks
            hold a stage. Actions name stage instances and embedding stages by number.
        instances: by number: instance ``pipe * num_stages + stage``; parts but the first of a stage come after these.
        embedding_stages: by process, numbered after the instances.
        num_processes: processes of a replica: 1, or one per pipeline rank.
        num_pipes: K; pipe k takes the examples [n k / K, n (k + 1) / K) of a replica's n.
        in_flight: compute lane that chooses the order of its F and B -> most micro-batches in flight; empty: all lanes
            have the program's order. RECVs are then in lanes ``recv<n>``.
        version_lags: of an asynchronous schedule, by stage: the weights that its batches have.
        turns: lane -> what it repeats, where actions of two batches alternate: the actions of `program` with offsets.
            Empty: every lane does one batch after the other.
    """

    graph: StageGraph
    schedule: str
    program: Program
    instances: tuple[StageInstance, ...]
    embedding_stages: tuple[EmbeddingStage, ...]
    num_processes: int
    num_pipes: int
    version_lags: Mapping[int, VersionLags] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    turns: Mapping[str, tuple[Template, ...]] = field(default_factory=dict)

    def embedding_stage_of(self, pipe: int) -> EmbeddingStage:
        """The embedding stage of a pipe's examples."""
        return next(embedding for embedding in self.embedding_stages if pipe in embedding.pipes)

    @property
    def has_parts(self) -> bool:
        """Whether stages have replicas of their own."""
        return any(instance.parts > 1 for instance in self.instances)

    def lanes_of(self, process: int) -> tuple[str, ...]:
        """The compute lanes of a process."""
        return tuple(
            dict.fromkeys(f"compute{instance.position}" for instance in self.instances if instance.process == process)
        )

    def receiving_lanes_of(self, process: int) -> tuple[str, ...]:
        """The lanes of a process with nothing but RECVs."""
        first = process * self.num_processes
        names = (f"recv{number}" for number in range(first, first + self.num_processes))
        return tuple(name for name in names if name in self.program.lanes)

    @property
    def rows_delay(self) -> int:
        """Updates of rows that a lookup leaves out: 1 if lookups precede the update of the batch before."""
        return 1 if self.turns else 0
