"""`Peers`: what a rank's engine needs of the others. Every call is made by all ranks, in the same order per lane."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["ExchangeLane", "Peers", "Pending", "RankGroup", "StageLinks", "StepVote"]

#: Lanes that exchange rows. Each has a communicator of its own, so that they never wait for each other.
ExchangeLane = Literal["pull", "push"]


class StepVote(enum.IntEnum):
    """What a rank would do with the next batch, weakest first."""

    GO = 0
    END = 1  # it has no further batch
    STOP = 2  # it was asked to stop


class Peers(Protocol):
    """The ranks of one job. Calls of one lane come from one thread; different lanes may call at the same time.

    Every call has the job's deadline, but for `gather`. All end once a rank, another or this one, has failed.

    Attributes:
        rank: this one, from 0.
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
        """All-to-all of rows; on a CUDA device ordered by the current stream, on a CPU done on return.

        Args:
            lane: whose communicator.
            output: contiguous ``[sum(output_rows), dim]``, filled: rows from rank 0, then from rank 1, …
            input: contiguous ``[sum(input_rows), dim]``: rows for rank 0, then for rank 1, …
            output_rows, input_rows: rows from and for each rank, this one included.

        Raises:
            PeerError: a peer is gone, or silent for longer than the deadline.
        """
        ...

    def agree(self, wish: StepVote) -> StepVote:
        """The strongest wish of any rank. Called once before each batch by the data lane.

        Raises:
            PeerError: as `exchange`.
        """
        ...

    def acknowledge(self) -> None:
        """Return when every rank has called this as often. Called by the ack lane, once per batch.

        Raises:
            PeerError: as `exchange`.
        """
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank. For one thread at a time, between phases and before the first batch.

        Has no deadline: a rank that writes its rows back for an hour is waited for as long as it is alive.

        Raises:
            PeerError: a peer is gone, or without a sign of life for longer than the deadline.
        """
        ...

    def report(self, error: BaseException) -> BaseException:
        """Tell the others that this rank ends with `error`, so that they do too, and its own waits. From any thread.

        Returns:
            What this rank should end with: another rank's error, if that came first.
        """
        ...


class RankGroup(Protocol):
    """Some ranks of a job that exchange values of their own. Calls come from one thread, in one order on all of them.

    On a CUDA device a call is ordered by the current stream, on a CPU done on return. Each raises `PeerError` as those
    of `Peers`.

    Attributes:
        rank: position of this rank in the group.
        world_size: ranks of the group.
    """

    rank: int
    world_size: int

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        """Rows for every rank, rows from every rank; see `Peers.exchange`."""
        ...

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """``output[r * n : (r + 1) * n]`` = rank r's 1-D `input` of n elements."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """The values of the rank at position `root` everywhere, in place; of any dtype and shape, alike everywhere."""
        ...


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when it is done (on a CUDA device: make the current stream wait).

        Raises:
            PeerError: the peer is gone, or silent for longer than the deadline.
            InputError, SystemExit: another rank has failed with it.
        """
        ...


class StageLinks(Protocol):
    """Tensors between the processes of one replica of a pipeline. For the compute lane of each.

    Transfers of one sender, receiver and tag arrive in the order of the calls. Both calls return at once; the tensor
    must stay as it is until `Pending.wait`.
    """

    def send(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """Give a contiguous tensor to a process of the replica, named by its position (0, 1, …)."""
        ...

    def receive(self, process: int, tag: int, tensor: Tensor) -> Pending:
        """Fill a contiguous tensor with what that process sends."""
        ...
