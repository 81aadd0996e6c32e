"""`StageSums`: gradient all-reduce of pipeline stages, each over the ranks that hold it.

    REDUCE_GRAD of stage s ─> its buckets, one by one: summed in the order of s.holders (`Bucket`)
                              one group per set of holders; a stage held by one rank needs none

The sums run on their own lane: each stage after its last backward, overlapping the backwards of other stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.buckets import BUCKET_BYTES, Bucket, make_buckets
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError

__all__ = ["StageSums"]


class StageSums:
    """One rank's stage gradient sums. A parameter without a gradient on any holder keeps none; the optimizer skips it.

    Args:
        stages: all stages of the model, by number, equal on all ranks.
        groups: this rank's groups, keyed by their ascending ranks: the result of `TorchPeers.open_stage_groups`.
        rank: this rank.
        bucket_bytes: largest size of a bucket; a larger parameter gets its own.

    Raises:
        InputError: a parameter is in two stages, whose holders would sum it separately.
    """

    def __init__(
        self,
        stages: Sequence[HeldStage],
        groups: Mapping[tuple[int, ...], RankGroup],
        *,
        rank: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _check_disjoint(stages)
        self._stages = tuple(stages)
        self._groups = groups
        self._buckets: dict[int, tuple[Bucket, ...]] = {
            number: make_buckets(stage.parameters, bucket_bytes, len(stage.holders))
            for number, stage in enumerate(stages)
            if rank in stage.holders and len(stage.holders) > 1
        }

    def reduce(self, stage: int, givers: Collection[int] | None = None) -> None:
        """All-reduce a stage's gradients over its holders. On a CPU complete on return; on CUDA in the current stream.

        One thread of every holder calls it once per batch. Ranks that share several stages use the same order.

        Args:
            stage: the stage.
            givers: the holders that have gradients, the same on all ranks; nothing is sent for others. None: all.

        Raises:
            PeerError: a peer is gone or silent.
            InputError: a gradient is sparse.
        """
        holders = self._stages[stage].holders
        ranks = sorted(holders)
        order = [ranks.index(rank) for rank in holders if givers is None or rank in givers]
        if not order:
            return
        for bucket in self._buckets.get(stage, ()):
            bucket.fill()
            bucket.exchange(self._groups[tuple(ranks)], order)
            bucket.copy_back()


def _check_disjoint(stages: Sequence[HeldStage]) -> None:
    seen: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.parameters:
            other = seen.setdefault(id(parameter), number)
            if other != number:
                raise InputError(f"model parameter {name} is used by stages {other} and {number}, expected one of them")
