"""`Timeline`: what a policy makes of jobs on ranks: pieces of computation and exchanges of gradients, with times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bagpipe.jigsaw.job import TrainingJob

__all__ = ["Exchange", "Piece", "Timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Forward and backward of one worker in one iteration: a rank runs it without interruption.

    Attributes:
        job, iteration, worker: numbers from 0.
        rank: where it runs.
        share: of the layers, from the last, that the backward computes.
        start_s, forward_end_s, finish_s: times.
    """

    job: int
    iteration: int
    worker: int
    rank: int
    share: float
    start_s: float
    forward_end_s: float
    finish_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchange of one iteration's gradients. No rank computes it; the job's next iteration may start at its end."""

    job: int
    iteration: int
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All that happens.

    Attributes:
        jobs: those that ran, by number.
        ranks: number of ranks.
        policy: its name.
        pieces, exchanges: by start.
    """

    jobs: tuple[TrainingJob, ...]
    ranks: int
    policy: str
    pieces: tuple[Piece, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def is_partial(self) -> bool:
        """Whether some job leaves out parts of the backward."""
        return any(job.is_partial for job in self.jobs)

    @property
    def label(self) -> str:
        """``jigsaw, partial backward``."""
        return f"{self.policy}, {'partial' if self.is_partial else 'full'} backward"

    @property
    def first_s(self) -> float:
        """The first arrival."""
        return min(job.arrival_s for job in self.jobs)

    @property
    def last_s(self) -> float:
        """The end of the last exchange."""
        return max(exchange.finish_s for exchange in self.exchanges)

    def of_rank(self, rank: int) -> Iterator[Piece]:
        """The pieces of a rank, by start."""
        return (piece for piece in self.pieces if piece.rank == rank)
