"""`run_jobs`: simulate jobs on ranks with a policy.

    arrival ──ranks of the job──> iteration waits ──policy──> pieces on ranks ──last ends──> exchange ──> next iteration

Time goes from event to event: arrivals, ends of pieces, ends of exchanges. After all events of a moment the policy
gives free ranks to waiting iterations. Nothing is planned ahead, and no rank idles that a waiting piece could take,
except for a gang: one that is next keeps the ranks that it waits for from those after it, so none waits for ever.

Where a job runs: with a policy that holds ranks for whole jobs, on the lowest free ranks when it starts; else, from its
arrival on, on the ranks with the least work left, because its parameters stay there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bagpipe.jigsaw.job import TrainingJob, check_jobs
from bagpipe.jigsaw.policy import Policy
from bagpipe.jigsaw.timeline import Exchange, Piece, Timeline

__all__ = ["run_jobs"]


def run_jobs(jobs: Sequence[TrainingJob], ranks: int, policy: Policy) -> Timeline:
    """Simulate jobs.

    Args:
        jobs: by number.
        ranks: number of ranks.
        policy: one of `POLICIES`.

    Raises:
        InputError: the jobs cannot run on these ranks; see `check_jobs`.
    """
    check_jobs(jobs, ranks)
    run = _Run(jobs, ranks, policy)
    run.walk()
    return Timeline(
        jobs=tuple(jobs), ranks=ranks, policy=policy.name, pieces=tuple(run.pieces), exchanges=tuple(run.exchanges)
    )


@dataclass(slots=True, kw_only=True)
class _Progress:
    """A job on its way.

    Attributes:
        has_arrived: it can run.
        ranks: of its workers; empty: not chosen yet.
        iteration: the current one.
        released_s: when it could start.
        waiting: rank -> worker of its pieces that have not started.
        running: pieces that have started and not ended.
        attained_s: seconds of all pieces that have started.
    """

    job: TrainingJob
    number: int
    has_arrived: bool = False
    ranks: tuple[int, ...] = ()
    iteration: int = 0
    released_s: float = 0.0
    waiting: dict[int, int] = field(default_factory=dict)
    running: int = 0
    attained_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether pieces wait, or the job for its ranks."""
        return bool(self.waiting) or (self.has_arrived and not self.ranks)

    @property
    def left_s(self) -> float:
        """Seconds on each of its ranks in the iterations that have not ended, on average."""
        return (self.job.iterations - self.iteration) * self.job.computing_s / self.job.workers


class _Run:
    """The state between two events."""

    def __init__(self, jobs: Sequence[TrainingJob], ranks: int, policy: Policy) -> None:
        self.pieces: list[Piece] = []
        self.exchanges: list[Exchange] = []
        self._policy = policy
        self._progress = [_Progress(job=job, number=number) for number, job in enumerate(jobs)]
        self._exchange_s = [job.exchange_s for job in jobs]
        #: Number of the job that holds a rank.
        self._holder: list[int | None] = [None] * ranks
        #: (time, number of the event, what happens then); numbers are in the order of their making.
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        for progress in self._progress:
            self._at(progress.job.arrival_s, partial(self._arrive, progress))

    def walk(self) -> None:
        """Go through all events."""
        dispatch = self._start_pieces if self._policy.hold == "piece" else self._start_gangs
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                heapq.heappop(self._events)[2](now)
            dispatch(now)

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, happen))
        self._num_events += 1

    def _arrive(self, progress: _Progress, now: float) -> None:
        progress.has_arrived = True
        if self._policy.hold != "job":
            load = [0.0] * len(self._holder)
            for other in self._progress:
                for rank in other.ranks:
                    load[rank] += other.left_s
            best = sorted(range(len(load)), key=lambda rank: (load[rank], rank))
            progress.ranks = tuple(sorted(best[: progress.job.workers]))
        self._release(progress, now)

    def _release(self, progress: _Progress, now: float) -> None:
        progress.released_s = now
        progress.waiting = {rank: worker for worker, rank in enumerate(progress.ranks)}

    def _start_pieces(self, now: float) -> None:
        """Give each free rank the piece that is next."""
        for rank, holder in enumerate(self._holder):
            if holder is None:
                waiting = [progress for progress in self._progress if rank in progress.waiting]
                if waiting:
                    self._start(min(waiting, key=self._policy.order), rank, now)

    def _start_gangs(self, now: float) -> None:
        """Start the iterations whose ranks are all free, or are the job's own, in the policy's order."""
        kept: set[int] = set()
        for progress in sorted((each for each in self._progress if each.waits), key=self._policy.order):
            free = [rank for rank, holder in enumerate(self._holder) if holder is None and rank not in kept]
            own = [rank for rank, holder in enumerate(self._holder) if holder == progress.number]
            if not progress.ranks and len(free) >= progress.job.workers:
                progress.ranks = tuple(free[: progress.job.workers])
                self._release(progress, progress.released_s)
            if progress.ranks and {*free, *own} >= {*progress.ranks}:
                for rank in progress.ranks:
                    self._start(progress, rank, now)
            else:
                kept |= {*(progress.ranks or free)}

    def _start(self, progress: _Progress, rank: int, now: float) -> None:
        worker = progress.waiting.pop(rank)
        job = progress.job
        share = job.share_of(worker, progress.iteration)
        forward_end_s = now + job.forward_s
        finish_s = forward_end_s + job.backward_of_s(share)
        self.pieces.append(
            Piece(
                job=progress.number,
                iteration=progress.iteration,
                worker=worker,
                rank=rank,
                share=share,
                start_s=now,
                forward_end_s=forward_end_s,
                finish_s=finish_s,
            )
        )
        self._holder[rank] = progress.number
        progress.running += 1
        progress.attained_s += finish_s - now
        self._at(finish_s, partial(self._end_piece, progress, rank))

    def _end_piece(self, progress: _Progress, rank: int, now: float) -> None:
        if self._policy.hold == "piece":
            self._holder[rank] = None
        progress.running -= 1
        if not progress.running and not progress.waiting:
            finish_s = now + self._exchange_s[progress.number]
            self.exchanges.append(
                Exchange(job=progress.number, iteration=progress.iteration, start_s=now, finish_s=finish_s)
            )
            self._at(finish_s, partial(self._end_iteration, progress))

    def _end_iteration(self, progress: _Progress, now: float) -> None:
        progress.iteration += 1
        is_last = progress.iteration == progress.job.iterations
        if self._policy.hold == "iteration" or (self._policy.hold == "job" and is_last):
            for rank in progress.ranks:
                self._holder[rank] = None
        if not is_last:
            self._release(progress, now)
