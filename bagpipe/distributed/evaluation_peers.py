"""`EvaluationPeers`: the other ranks for evaluations, over process groups of their own.

While training rests, its lanes can hold batches whose exchanges are still to come. Messages of an evaluation travel
beside them, so neither takes those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from bagpipe.distributed.collectives import LaneGroup
from bagpipe.distributed.interface import ExchangeLane, StepVote

__all__ = ["EvaluationPeers"]


class _Job(Protocol):
    """The part of `TorchPeers` that an evaluation shares with the training."""

    rank: int
    world_size: int
    timeout_s: float

    def gather(self, value: Any) -> list[Any]: ...

    def report(self, error: BaseException) -> BaseException: ...


class EvaluationPeers:
    """`Peers` of an evaluation. `TorchPeers.evaluation` makes it.

    Args:
        job: the ranks of the job: control messages and failures.
        open_lane: opens a lane of all ranks, named after its purpose, on the device or on the host.

    Attributes:
        rank, world_size, timeout_s: those of the job.
        plans: lane of the ids and plans.
    """

    def __init__(self, job: _Job, open_lane: Callable[[str, bool], LaneGroup]) -> None:
        self.rank = job.rank
        self.world_size = job.world_size
        self.timeout_s = job.timeout_s
        self._job = job
        self._pull = open_lane("evaluation pull", True)
        self._agree = open_lane("evaluation agree", False)
        self.plans = open_lane("evaluation plans", False)

    def exchange(
        self,
        lane: ExchangeLane,
        output: Tensor,
        input: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> None:
        """See `Peers`; an evaluation has no gradients to push."""
        assert lane == "pull", lane
        self._pull.all_to_all(output, input, output_rows, input_rows)

    def agree(self, vote: StepVote) -> StepVote:
        """See `Peers`."""
        return StepVote(self._agree.maximum(vote))

    def acknowledge(self) -> None:
        """See `Peers`; an evaluation writes nothing."""
        raise AssertionError("an evaluation writes nothing")

    def gather(self, value: Any) -> list[Any]:
        """See `Peers`."""
        return self._job.gather(value)

    def report(self, error: BaseException) -> BaseException:
        """See `Peers`."""
        return self._job.report(error)
