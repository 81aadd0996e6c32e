"""`TrainingJob`: a data-parallel job as a scheduler sees it: workers, seconds, shares of the backward, exchange.

    iteration k:  worker w:  F (forward_s)  B (the last `share_of(w, k)` of the layers)  ──all workers──>  exchange

Structured partial backward (SPB; A. Kumar, K. Subramanian, S. Venkataraman, A. Akella, "Doing More by Doing Less: How
Structured Partial Backpropagation Improves Deep Learning Clusters", arXiv 2111.10672): a worker computes the backward
of the last share of the layers only. Here it is a cost, nothing else: what it does to the model is not simulated. The
rotation of the shares and the times of partial work are this project's model, not the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bagpipe.errors import InputError

__all__ = ["TrainingJob", "check_jobs", "of_last"]

#: Pieces that are simulated at most: more take minutes and gigabytes.
MOST_PIECES = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One job.

    Attributes:
        name: for people; different for each job.
        iterations: to be done.
        workers: ranks that it needs, each with the whole model.
        forward_s: seconds of the forward of an iteration on a worker.
        backward_s: seconds of the whole backward of the same, by stages of equally many layers, first to last.
        sync_s: seconds from the last worker's end to the next iteration, besides the bytes of the gradients.
        gradient_bytes: bytes of the gradients by stages of equally many layers, first to last.
        bytes_per_s: of each worker's port, in each direction; 0: there are no bytes.
        shares: of the layers, from the last, whose backward the workers compute in iteration 0; empty: all of all.
        arrival_s: when it can start.
        deadline_s: when it should be done, on the same clock; None: whenever.
        weight: its part of the ranks' time with policy fair.

    Raises:
        InputError: a value is out of its range; one line with the job's name.
    """

    name: str
    iterations: int
    workers: int
    forward_s: float
    backward_s: tuple[float, ...]
    sync_s: float = 0.0
    gradient_bytes: tuple[float, ...] = ()
    bytes_per_s: float = 0.0
    shares: tuple[float, ...] = ()
    arrival_s: float = 0.0
    deadline_s: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise self._error("name", "a text on one line", repr(self.name))
        for name in ("iterations", "workers"):
            if getattr(self, name) < 1:
                raise self._error(name, "at least 1", getattr(self, name))
        for name in ("forward_s", "weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise self._error(name, "a number above 0", f"{getattr(self, name):g}")
        for name in ("sync_s", "bytes_per_s", "arrival_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise self._error(name, "a number of at least 0", f"{getattr(self, name):g}")
        for name in ("backward_s", "gradient_bytes"):
            wrong = next((each for each in getattr(self, name) if not 0 <= each < math.inf), None)
            if wrong is not None:
                raise self._error(name, "numbers of at least 0", f"{wrong:g}")
        if not self.backward_s:
            raise self._error("backward_s", "at least one number", "none")
        if any(self.gradient_bytes) and not self.bytes_per_s:
            raise self._error("bytes_per_s", "a number above 0 beside gradient_bytes", "0")
        self._check_shares()
        if self.deadline_s is not None and not self.arrival_s < self.deadline_s < math.inf:
            raise self._error("deadline_s", f"a time after the arrival at {self.arrival_s:g}", f"{self.deadline_s:g}")

    def _check_shares(self) -> None:
        if self.shares and len(self.shares) != self.workers:
            raise self._error("shares", f"one for each of {self.workers} workers", len(self.shares))
        wrong = next((share for share in self.shares if not 0 <= share <= 1), None)
        if wrong is not None:
            raise self._error("shares", "numbers from 0 to 1", f"{wrong:g}")
        if self.shares and not any(self.shares):
            raise self._error("shares", "one above 0, else nothing is trained", "0 for all workers")

    def _error(self, field: str, expected: str, got: object) -> InputError:
        return InputError(f"job {self.name!r}: {field}: expected {expected}, got {got}")

    @property
    def is_partial(self) -> bool:
        """Whether some worker leaves out a part of the backward."""
        return any(share < 1 for share in self.shares)

    def with_full_backward(self) -> TrainingJob:
        """The job with the whole backward on all workers."""
        return replace(self, shares=())

    def share_of(self, worker: int, iteration: int) -> float:
        """The share of a worker in an iteration: the shares move on by one worker each iteration.

        Worker w has ``shares[(w + iteration) % workers]``, so in `workers` iterations each has every share once.
        """
        return self.shares[(worker + iteration) % self.workers] if self.shares else 1.0

    def backward_of_s(self, share: float) -> float:
        """Seconds of the backward of the last `share` of the layers."""
        return of_last(self.backward_s, share)

    @property
    def computing_s(self) -> float:
        """Seconds of all workers in one iteration; every iteration has the same, with other workers."""
        shares = self.shares or (1.0,) * self.workers
        return math.fsum(self.forward_s + self.backward_of_s(share) for share in shares)

    @property
    def exchange_s(self) -> float:
        """Seconds of the exchange of an iteration's gradients.

        `sync_s`, and each layer's bytes over the port times a factor. With n workers, of which m computed the layer:

            m = n    2 (n-1)/n                        ring all-reduce (Patarasuk and Yuan, 2009)
            m < n    min(2 (n-1)/n, (m-1)/m + 1)      reduce-scatter among m, pipelined to all others, whole
            m = 0    0
        """
        if self.workers == 1 or not self.gradient_bytes:
            return self.sync_s
        shares = self.shares or (1.0,) * self.workers
        parts = [
            _factor(sum(share >= upper for share in shares), self.workers)
            * (of_last(self.gradient_bytes, upper) - of_last(self.gradient_bytes, lower))
            for lower, upper in pairwise(sorted({0.0, *shares}))
        ]
        return self.sync_s + (math.fsum(parts) / self.bytes_per_s if self.bytes_per_s else 0.0)

    @property
    def shortest_s(self) -> float:
        """Seconds of the whole job on ranks of its own: each iteration takes its longest worker and its exchange."""
        longest = max(self.shares, default=1.0)
        return self.iterations * (self.forward_s + self.backward_of_s(longest) + self.exchange_s)


def of_last(values: Sequence[float], share: float) -> float:
    """The part of stage-wise values that the last `share` of the layers has; stages have equally many layers."""
    stages = share * len(values)
    return math.fsum(value * min(1.0, max(0.0, stages - place)) for place, value in enumerate(reversed(values)))


def _factor(computing: int, workers: int) -> float:
    """Bytes over a port for each byte of a layer; see `TrainingJob.exchange_s`."""
    ring = 2 * (workers - 1) / workers
    return min(ring, (computing - 1) / computing + 1) if 0 < computing < workers else ring if computing else 0.0


def check_jobs(jobs: Sequence[TrainingJob], ranks: int) -> None:
    """Check jobs together.

    Raises:
        InputError: there is no job or rank, two have one name, one needs more ranks, or together they are too long to
            simulate.
    """
    if ranks < 1:
        raise InputError(f"ranks: expected at least 1, got {ranks}")
    if not jobs:
        raise InputError("jobs: expected at least one, got none")
    names = [job.name for job in jobs]
    double = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if double is not None:
        raise InputError(f"jobs: expected a name for each, got {double!r} twice")
    wide = next((job for job in jobs if job.workers > ranks), None)
    if wide is not None:
        raise InputError(f"job {wide.name!r}: workers: expected at most the {ranks} ranks, got {wide.workers}")
    pieces = sum(job.iterations * job.workers for job in jobs)
    if pieces > MOST_PIECES:
        raise InputError(
            f"jobs: expected at most {MOST_PIECES:,} iterations of workers to simulate, got {pieces:,}; simulate fewer "
            "iterations of each"
        )
