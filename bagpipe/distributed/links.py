"""`TorchLinks`: what the stages of one replica of a pipeline send each other, over torch.distributed.

host    all pairs of ranks in two gloo groups, one to higher ranks and one to lower: in one connection a send would wait
        while a transfer the other way is read; the tag tells transfers apart
device  a communicator for every ordered pair: nccl does the transfers of one in the order of the calls, on one
        stream, so that a receive that waits would hold up a send (no test runs this side: it takes two devices)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bagpipe.distributed.interface import Pending
from bagpipe.distributed.lane_group import LaneGroup

__all__ = ["TorchLinks"]


class TorchLinks:
    """`bagpipe.distributed.interface.StageLinks` for one rank. Made by `TorchPeers.open_links`.

    On a device, transfers from one process to another are matched by the order of the calls, whatever their tags: both
    sides must call in one order.

    Args:
        outward: by receiver, a position in the replica: the lane to it, and its position among the lane's ranks.
        inward: by sender, the same.
    """

    def __init__(
        self, outward: Mapping[int, tuple[LaneGroup, int]], inward: Mapping[int, tuple[LaneGroup, int]]
    ) -> None:
        self._outward = outward
        self._inward = inward

    def send(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """See `StageLinks`. KeyError for this process itself.

        Raises:
            PeerError: the peer is gone, or this rank has failed. InputError, SystemExit: another rank has failed.
        """
        lane, to = self._outward[process]
        return lane.send(tensor, to, tag)

    def receive(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """See `send`."""
        lane, source = self._inward[process]
        return lane.receive(tensor, source, tag)
