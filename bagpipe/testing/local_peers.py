"""`local_peers`: the ranks of a job as threads of one process, for tests and debuggers. Values are exact, time is not.

first, second = local_peers(2)
    thread 1: Engine(…, peers=first).train(steps of rank 0)
    thread 2: Engine(…, peers=second).train(steps of rank 1)

Every call is a meeting of all ranks at one place per lane: each lays down what it brings, and takes what is for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bagpipe.errors import PeerError
from bagpipe.peers.interface import ExchangeLane, Wish

__all__ = ["LocalPeers", "local_peers"]

_PLACES = ("pull", "push", "agree", "acknowledge", "gather")


class _Place:
    """Where the calls of one lane meet."""

    def __init__(self, world_size: int, timeout_s: float | None) -> None:
        self._barrier = threading.Barrier(world_size, timeout=timeout_s)
        self._brought: list[Any] = [None] * world_size

    @contextmanager
    def meet(self, rank: int, value: Any) -> Any:
        """Lay down a value; inside the block all ranks' values lie there."""
        self._brought[rank] = value
        try:
            self._barrier.wait()
            yield list(self._brought)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerError("another rank failed, or did not come within the deadline") from None

    def close(self) -> None:
        self._barrier.abort()


class LocalPeers:
    """One rank; see `bagpipe.peers.interface.Peers`. Made by `local_peers`.

    Attributes:
        rank: this one.
        world_size: number of ranks.
        timeout_s: deadline of a call.
        rows_sent: rows given to other ranks so far, by lane.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float, places: Mapping[str, _Place]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.rows_sent: dict[str, int] = {"pull": 0, "push": 0}
        self._places = places

    def exchange(
        self,
        lane: ExchangeLane,
        output: Tensor,
        input: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> None:
        given = torch.split(input, list(input_rows))
        with self._places[lane].meet(self.rank, given) as brought:
            for taken, parts in zip(torch.split(output, list(output_rows)), brought, strict=True):
                if taken.shape != parts[self.rank].shape:
                    raise PeerError(f"expected rows of shape {list(taken.shape)}, got {list(parts[self.rank].shape)}")
                taken.copy_(parts[self.rank])
        self.rows_sent[lane] += sum(input_rows) - input_rows[self.rank]

    def agree(self, wish: Wish) -> Wish:
        with self._places["agree"].meet(self.rank, wish) as wishes:
            return Wish(max(wishes))

    def acknowledge(self) -> None:
        with self._places["acknowledge"].meet(self.rank, None):
            pass

    def gather(self, value: Any) -> list[Any]:
        with self._places["gather"].meet(self.rank, json.dumps(value)) as values:
            return [json.loads(text) for text in values]

    def report(self, error: BaseException) -> BaseException:
        self.close()
        return error

    def close(self) -> None:
        """This rank is gone: every call of the others, now or later, is a PeerError."""
        for place in self._places.values():
            place.close()


def local_peers(world_size: int, *, timeout_s: float = 60.0) -> list[LocalPeers]:
    """All ranks of a job, by rank.

    Args:
        world_size: number of ranks.
        timeout_s: deadline of every call but `gather`, since a thread is always alive.
    """
    places = {name: _Place(world_size, None if name == "gather" else timeout_s) for name in _PLACES}
    return [LocalPeers(rank, world_size, timeout_s, places) for rank in range(world_size)]
