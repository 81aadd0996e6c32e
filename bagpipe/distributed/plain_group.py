"""`PlainGroup`: a process group of a program of one's own, such as DistributedDataParallel's, as a `RankGroup`.

Its exchanges have the process group's own deadline and errors; a job's lanes have `bagpipe.distributed.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

__all__ = ["PlainGroup"]


class PlainGroup:
    """See `bagpipe.distributed.interface.RankGroup`. Calls are complete on return, or ordered by the current stream.

    Args:
        group: the process group; None: the default one.

    Attributes:
        rank: position of this rank in the group.
        world_size: number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        """All-to-all of rows; see `Peers.exchange`."""
        dist.all_to_all_single(output, input, list(output_rows), list(input_rows), group=self._group)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """``output[r * n : (r + 1) * n]`` = rank r's 1-D `input` of n elements."""
        dist.all_gather(list(output.chunk(self.world_size)), input, group=self._group)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Broadcast in place from position `root`."""
        dist.broadcast(tensor, group_src=root, group=self._group)
