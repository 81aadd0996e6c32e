"""`Peers`: communication a rank's engine needs. All ranks make every call, in the same order per lane."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["ExchangeLane", "Peers", "Pending", "RankGroup", "StageLinks", "StepVote"]

#: Lanes that exchange rows. Each has its own communicator, so neither lane waits for the other.
ExchangeLane = Literal["pull", "push"]


class StepVote(enum.IntEnum):
    """A rank's vote on the next batch. The maximum over all ranks wins."""

    GO = 0
    WAIT = 1  # the rank's next batch has not come: all vote again
    END = 2  # the rank has no further batch
    STOP = 3  # the rank was asked to stop


class Peers(Protocol):
    """The ranks of one job. One thread calls per lane; lanes run concurrently.

    Every call except `gather` has the job's deadline. Every call fails once any rank, this one included, has failed.

    Attributes:
        rank: this rank, from 0.
        world_size: number of ranks.
        timeout_s: the deadline.
    """

    rank: int
    world_size: int
    timeout_s: float

    def exchange(
        self,
        lane: ExchangeLane,
        output: Tensor,
        input: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> None:
        """All-to-all of rows. On CUDA ordered by the current stream; on a CPU complete on return.

        Args:
            lane: selects the communicator.
            output: contiguous ``[sum(output_rows), dim]``, filled: rows from rank 0, then from rank 1, …
            input: contiguous ``[sum(input_rows), dim]``: rows for rank 0, then for rank 1, …
            output_rows, input_rows: row counts from and for each rank, this one included.

        Raises:
            PeerError: a peer is gone, or silent for longer than the deadline.
        """
        ...

    def agree(self, vote: StepVote) -> StepVote:
        """The maximum of all ranks' votes. The data lane calls it before each batch, until no rank waits.

        Raises:
            PeerError: as `exchange`.
        """
        ...

    def acknowledge(self) -> None:
        """Barrier: return when every rank has made this call. The ack lane calls it once per batch.

        Raises:
            PeerError: as `exchange`.
        """
        ...

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's JSON-able value, ordered by rank. For one thread, between phases or before training.

        No deadline: a rank can write rows back for an hour. Heartbeats detect dead ranks.

        Raises:
            PeerError: a peer is gone, or has sent no heartbeat for longer than the deadline.
        """
        ...

    def report(self, error: BaseException) -> BaseException:
        """Report that this rank ends with `error`. Ends the other ranks and all waits of this one. Thread-safe.

        Returns:
            The error this rank should end with: another rank's error if that came first.
        """
        ...


class RankGroup(Protocol):
    """A subset of the job's ranks with its own communicator. One thread calls, in the same order on all members.

    On CUDA a call is ordered by the current stream; on a CPU it is complete on return. Each raises `PeerError` like
    `Peers.exchange`.

    Attributes:
        rank: position of this rank in the group.
        world_size: number of ranks in the group.
    """

    rank: int
    world_size: int

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        """All-to-all of rows; see `Peers.exchange`."""
        ...

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """``output[r * n : (r + 1) * n]`` = rank r's 1-D `input` of n elements."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Broadcast in place from position `root`. Any dtype and shape, equal on all members."""
        ...


class Pending(Protocol):
    """A pending transfer."""

    def wait(self) -> None:
        """Wait for completion. On CUDA only the current stream waits.

        Raises:
            PeerError: the peer is gone, or silent for longer than the deadline.
            InputError, SystemExit: another rank has failed with this error.
        """
        ...


class StageLinks(Protocol):
    """Point-to-point transfers between the processes of one pipeline replica. Called by their compute lanes.

    Transfers with equal sender, receiver and tag arrive in call order. Both calls are asynchronous; the tensor must
    not change until `Pending.wait` returns.
    """

    def send(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """Send a contiguous tensor to the process at a position (0, 1, …) of the replica."""
        ...

    def receive(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """Receive into a contiguous tensor from the process at that position."""
        ...
