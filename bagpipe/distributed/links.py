"""`TorchLinks`: point-to-point transfers between the stages of one pipeline replica, over torch.distributed.

host    two gloo groups of all ranks, one for sends to higher ranks and one to lower: on a shared connection a send
        waits while a transfer the other way is read. Tags identify transfers.
device  one communicator per ordered pair: nccl runs the transfers of a communicator in call order on one stream, so a
        waiting receive would block a send. Untested: it takes two devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bagpipe.distributed.collectives import LaneGroup
from bagpipe.distributed.interface import Pending

__all__ = ["TorchLinks"]


class TorchLinks:
    """`bagpipe.distributed.interface.StageLinks` for one rank. Created by `TorchPeers.open_links`.

    On a device, call order alone matches transfers between two processes, not tags: both sides call in the same order.

    Args:
        outward: receiver's position in the replica -> the lane to it, and its position in the lane.
        inward: sender's position in the replica -> the lane from it, and its position in the lane.
    """

    def __init__(
        self, outward: Mapping[int, tuple[LaneGroup, int]], inward: Mapping[int, tuple[LaneGroup, int]]
    ) -> None:
        self._outward = outward
        self._inward = inward

    def send(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """See `StageLinks`.

        Raises:
            KeyError: `process` is this one.
            PeerError: the peer is gone, or this rank has failed.
            InputError, SystemExit: another rank has failed.
        """
        lane, to = self._outward[process]
        return lane.send(tensor, to, tag)

    def receive(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """See `send`."""
        lane, source = self._inward[process]
        return lane.receive(tensor, source, tag)
