"""`PartialBackward`: which backwards of a batch the ranks compute, and the factor that makes a stage's gradient a mean.

    BackwardShares, StepProgram ──> computes(stage, micro-batch)? on every rank the same answer, without messages
    examples of the units that compute stage s in batch b ──> factor N / N(s, b) of its gradients; None: no gradient

The loss is divided by the N examples of the global batch, so that a sum over some of them is too small by this factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from bagpipe.pipeline.stage.batches import bounds
from bagpipe.schedule.ir.backward_shares import BackwardShares
from bagpipe.schedule.ir.step_program import StepProgram

__all__ = ["PartialBackward"]

#: Kinds of batches whose factors are kept: (place in the rotation, number of examples, stage).
_MAX_KINDS = 4096


class PartialBackward:
    """The partial backwards of one replica.

    Args:
        rule: of the stages and units.
        step: the program of a batch.
        replica: the replica of this process.
        num_replicas: of the job.
        examples: (replica, examples of a batch) -> first and end of the replica's examples.

    Attributes:
        rule, replica: as given.
        earlier: batches of earlier jobs, which the rotation counts too.
    """

    def __init__(
        self,
        rule: BackwardShares,
        step: StepProgram,
        *,
        replica: int,
        num_replicas: int,
        examples: Callable[[int, int], tuple[int, int]],
    ) -> None:
        self.rule = rule
        self._step = step
        self.replica = replica
        self.earlier = 0
        self._num_replicas = num_replicas
        self._examples = examples
        self._num_computed = lru_cache(_MAX_KINDS)(self._count)

    def computes(self, stage: int, pipe: int, batch: int, micro: int) -> bool:
        """Whether a stage computes the backward of a micro-batch of a pipe of this replica. An embedding stage does."""
        if stage == self._step.graph.num_stages:
            return True
        return self.rule.computes(stage, self.earlier + batch, self.rule.unit(self.replica, pipe, micro))

    def factor(self, stage: int, batch: int, num_global_examples: int) -> float | None:
        """Factor from the sum of a stage's gradients to the mean over the examples that reached it; None: none did."""
        computed = self._num_computed(stage, (self.earlier + batch) % self.rule.num_shares, num_global_examples)
        return num_global_examples / computed if computed else None

    def gives(self, stage: int, batch: int, replica: int, pipes: Sequence[int]) -> bool:
        """Whether the instances of a stage in some pipes of a replica compute any backward of a batch."""
        micro = range(self.rule.microbatches or 1)
        return any(
            self.rule.computes(stage, self.earlier + batch, self.rule.unit(replica, pipe, unit))
            for pipe in pipes
            for unit in micro
        )

    def _count(self, stage: int, place: int, num_global_examples: int) -> int:
        """Examples of a batch whose units compute the backward of a stage."""
        found = 0
        for replica in range(self._num_replicas):
            first, end = self._examples(replica, num_global_examples)
            pipes = bounds(end - first, self.rule.pipes)
            for pipe in range(self.rule.pipes):
                cuts = bounds(pipes[pipe + 1] - pipes[pipe], self.rule.microbatches or 1)
                for micro in range(self.rule.microbatches or 1):
                    if self.rule.computes(stage, place, self.rule.unit(replica, pipe, micro)):
                        found += cuts[micro + 1] - cuts[micro]
        return found
