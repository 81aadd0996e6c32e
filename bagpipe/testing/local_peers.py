"""`local_peers`: the ranks of a job as threads of one process, for tests and debuggers. Values are exact, time is not.

first, second = local_peers(2)
    thread 1: Engine(…, peers=first).train(batches of rank 0)
    thread 2: Engine(…, peers=second).train(batches of rank 1)

Each lane has a rendezvous. In every collective call, each rank deposits its value there and reads the others' values.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bagpipe.distributed.interface import ExchangeLane, StepVote
from bagpipe.errors import PeerError
from bagpipe.testing.local_links import LocalLinks, Mail

__all__ = ["LocalPeers", "local_peers"]


class _Rendezvous:
    """Barrier and values of the collective calls of one lane. A call that all ranks have made ends well for each."""

    def __init__(self, num_ranks: int, timeout_s: float | None) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._values: list[Any] = [None] * num_ranks
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._num_passed = 0  # barriers that all ranks have reached
        self._is_closed = False

    @contextmanager
    def meet(self, position: int, value: Any) -> Iterator[list[Any]]:
        """Deposit a value. Inside the block, the values of all ranks are available."""
        self._values[position] = value
        self._wait()
        yield list(self._values)
        self._wait()
        self._values[position] = None  # what was given is not kept alive

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            barrier = self._num_passed
            self._num_waiting += 1
            if self._num_waiting == self._num_ranks and not self._is_closed:
                self._num_waiting = 0
                self._num_passed += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_passed > barrier or self._is_closed, self._timeout_s)
            if self._num_passed == barrier:
                self.close()
                raise PeerError("another rank failed, or did not come within the deadline")


class _Job:
    """State shared by the ranks of a job."""

    def __init__(self, timeout_s: float) -> None:
        self.mail = Mail(timeout_s)
        self._timeout_s = timeout_s
        self._rendezvous: dict[tuple[str, tuple[int, ...]], _Rendezvous] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def rendezvous(self, name: str, ranks: Sequence[int]) -> _Rendezvous:
        """The rendezvous of a lane and its ranks, created by the first caller. `gather` has no deadline."""
        with self._lock:
            key = name, tuple(ranks)
            if key not in self._rendezvous:
                self._rendezvous[key] = _Rendezvous(len(ranks), None if name == "gather" else self._timeout_s)
                if self._is_closed:
                    self._rendezvous[key].close()
            return self._rendezvous[key]

    def close(self) -> None:
        """Mark a rank as gone: pending and future calls of the others raise PeerError."""
        with self._lock:
            self._is_closed = True
            for rendezvous in self._rendezvous.values():
                rendezvous.close()
        self.mail.close()


class _LocalGroup:
    """`bagpipe.distributed.interface.RankGroup` of threads.

    Attributes:
        rank: rank in the group.
        world_size: number of ranks in the group.
    """

    def __init__(self, rendezvous: _Rendezvous, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._rendezvous = rendezvous

    def all_to_all(self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int]) -> None:
        given = torch.split(input, list(input_rows))
        with self._rendezvous.meet(self.rank, given) as values:
            for taken, parts in zip(torch.split(output, list(output_rows)), values, strict=True):
                if taken.shape != parts[self.rank].shape:
                    raise PeerError(f"expected rows of shape {list(taken.shape)}, got {list(parts[self.rank].shape)}")
                taken.copy_(parts[self.rank])

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        with self._rendezvous.meet(self.rank, input) as values:
            output.copy_(torch.cat(values))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        with self._rendezvous.meet(self.rank, tensor.detach()) as values:
            if self.rank != root:
                tensor.detach().copy_(values[root])


class LocalPeers:
    """One rank; see `bagpipe.distributed.interface.Peers`. Created by `local_peers`.

    Attributes:
        rank: rank in the job.
        world_size: number of ranks.
        timeout_s: deadline of a call.
        rows_sent: rows sent to other ranks so far, by lane.
        dense, plans: groups of all ranks, for the dense part and for the plans of batches that the ranks bring.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float, job: _Job, phase: str = "") -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.rows_sent: dict[str, int] = {"pull": 0, "push": 0}
        self._job = job
        self._phase = phase
        self._all = tuple(range(world_size))
        self._lanes = {lane: self._group(lane, self._all) for lane in ("pull", "push")}
        self.dense = self._group("dense", self._all)
        self.plans = self._group("plans", self._all)

    def exchange(
        self,
        lane: ExchangeLane,
        output: Tensor,
        input: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
    ) -> None:
        self._lanes[lane].all_to_all(output, input, output_rows, input_rows)
        self.rows_sent[lane] += sum(input_rows) - input_rows[self.rank]

    def agree(self, vote: StepVote) -> StepVote:
        with self._rendezvous("agree").meet(self.rank, vote) as votes:
            return StepVote(max(votes))

    def acknowledge(self) -> None:
        with self._rendezvous("acknowledge").meet(self.rank, None):
            pass

    def gather(self, value: Any) -> list[Any]:
        with self._rendezvous("gather").meet(self.rank, json.dumps(value)) as values:
            return [json.loads(text) for text in values]

    def report(self, error: BaseException) -> BaseException:
        self.close()
        return error

    def evaluation(self) -> LocalPeers:
        """See `TorchPeers.evaluation`."""
        return LocalPeers(self.rank, self.world_size, self.timeout_s, self._job, "evaluation ")

    def open_links(self, num_processes: int) -> LocalLinks:
        """See `TorchPeers.open_links`."""
        return LocalLinks(self._job.mail, self.rank, self.rank - self.rank % num_processes)

    def open_stage_groups(
        self, holders: Collection[Sequence[int]], purpose: str = "sums"
    ) -> dict[tuple[int, ...], _LocalGroup]:
        """See `TorchPeers.open_stage_groups`."""
        wanted = {tuple(sorted(set(ranks))) for ranks in holders}
        return {ranks: self._group(purpose, ranks) for ranks in wanted if len(ranks) > 1 and self.rank in ranks}

    def close(self) -> None:
        """Mark this rank as gone: pending and future calls of the others raise PeerError."""
        self._job.close()

    def _rendezvous(self, name: str) -> _Rendezvous:
        return self._job.rendezvous(name if name == "gather" else self._phase + name, self._all)

    def _group(self, name: str, ranks: tuple[int, ...]) -> _LocalGroup:
        return _LocalGroup(self._job.rendezvous(self._phase + name, ranks), ranks.index(self.rank), len(ranks))


def local_peers(world_size: int, *, timeout_s: float = 60.0) -> list[LocalPeers]:
    """All ranks of a job, by rank.

    Args:
        world_size: number of ranks.
        timeout_s: deadline of every call except `gather`; gather waits for as long as the other threads live.
    """
    job = _Job(timeout_s)
    return [LocalPeers(rank, world_size, timeout_s, job) for rank in range(world_size)]
