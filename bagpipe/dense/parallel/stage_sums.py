"""`StageSums`: gradients of a pipeline's stages, summed over the ranks that hold each.

    REDUCE_GRAD of stage s ─> its buckets, one by one: summed in the order of s.holders (`Bucket`)
                              one group per set of holders; a stage held by one rank needs none

Stages are summed on a lane of their own, each when its last backward is done, while backwards of others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.buckets import BUCKET_BYTES, Bucket, make_buckets
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["StageSums"]


class StageSums:
    """One rank's end. A parameter that has a gradient on no holder keeps none, and an optimizer leaves it alone.

    Args:
        stages: all of the model's, by number, alike on all ranks.
        groups: of this rank, by their ranks, ascending; as `TorchPeers.open_stage_groups` gives them for the stages'
            holders.
        rank: this one.
        bucket_bytes: gradients that travel together, at most (one parameter at least).

    Raises:
        InputError: a parameter is in two stages, whose holders would sum it apart.
    """

    def __init__(
        self,
        stages: Sequence[HeldStage],
        groups: Mapping[tuple[int, ...], RankGroup],
        *,
        rank: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _check_apart(stages)
        self._stages = tuple(stages)
        self._groups = groups
        self._buckets: dict[int, tuple[Bucket, ...]] = {
            number: make_buckets(stage.parameters, bucket_bytes, len(stage.holders))
            for number, stage in enumerate(stages)
            if rank in stage.holders and len(stage.holders) > 1
        }

    def reduce(self, stage: int) -> None:
        """Make a stage's gradients the sums over its holders: on a CPU on return, on a device in the current stream.

        Called by all holders, once per batch, by one thread; ranks that share several stages call in one order.

        Raises:
            PeerError: a peer is gone or silent.
            InputError: a gradient is sparse.
        """
        holders = self._stages[stage].holders
        ranks = sorted(holders)
        order = [ranks.index(rank) for rank in holders]
        for bucket in self._buckets.get(stage, ()):
            bucket.fill()
            bucket.exchange(self._groups[tuple(ranks)], order)
            bucket.copy_back()


def _check_apart(stages: Sequence[HeldStage]) -> None:
    seen: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.parameters:
            other = seen.setdefault(id(parameter), number)
            if other != number:
                raise InputError(f"model parameter {name} is used by stages {other} and {number}, expected one of them")
