"""`Peers`: what a rank's engine needs of the others. Every call is made by all ranks, in the same order per lane."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["ExchangeLane", "Peers", "Wish"]

#: Lanes that exchange rows. Each has a communicator of its own, so that they never wait for each other.
ExchangeLane = Literal["pull", "push"]


class Wish(enum.IntEnum):
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

    def agree(self, wish: Wish) -> Wish:
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
