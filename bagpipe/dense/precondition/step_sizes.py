"""`StepSizes`: preconditioned gradient times gradient of every layer of a model in stages, on every rank.

    sizes of the layers of own stages ──all-gather over the ranks with layers──> of all layers, in the order of stages

Each number comes from one rank, the first holder of its stage, so their sum has the same bits for any placement.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bagpipe.dense.parallel.buckets import add_up
from bagpipe.dense.precondition.kfac import Kfac
from bagpipe.distributed.interface import RankGroup

__all__ = ["StepSizes"]


class StepSizes:
    """See above. One thread of every rank makes the same calls.

    Args:
        num_layers: by stage.
        gives: stages whose sizes this rank gives.
        group: the ranks that hold layers; None: this rank alone does.

    Attributes:
        all: ``[layers]`` of the latest batch; None: there was none.
    """

    def __init__(self, num_layers: Mapping[int, int], *, gives: frozenset[int], group: RankGroup | None = None) -> None:
        self.all: Tensor | None = None
        self._num_layers = dict(sorted(num_layers.items()))
        self._gives = gives
        self._group = group

    def add_up(self, kfacs: Mapping[int, Kfac]) -> None:
        """Collect the sizes of all stages.

        Args:
            kfacs: of the stages that this rank holds, at least one.

        Raises:
            PeerError: a rank is gone or silent.
        """
        like = next(iter(kfacs.values())).sizes
        own = [
            kfacs[stage].sizes if stage in self._gives else like.new_zeros(count)
            for stage, count in self._num_layers.items()
        ]
        sizes = torch.cat(own)
        if self._group is not None:
            sizes = add_up(self._group, sizes)
        self.all = sizes
