"""`Outcome`: what a timeline comes to, by job, by rank and for the cluster.

    utilisation of a rank      seconds that it computes / makespan
    efficiency of the cluster  the mean of the ranks' utilisation
    makespan                   from the first arrival to the end of the last exchange

Only what a rank computes counts: neither the part of a backward that a worker leaves out, nor time for which a gang
holds a rank that has nothing to do. Efficiency alone does not compare runs with full and with partial backwards, which
do different work: `backward_share` says how much of the backward is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bagpipe.jigsaw.job import TrainingJob
from bagpipe.jigsaw.timeline import Piece, Timeline

__all__ = ["JobOutcome", "Outcome", "outcome_of", "plain_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Figures of one job.

    Attributes:
        name, iterations, workers, arrival_s, deadline_s: of the job.
        start_s: of its first piece.
        finish_s: end of its last exchange.
        iteration_s: mean time of an iteration: from its first start to its end, over the iterations.
        computed_s: seconds of ranks that computed for it.
        backward_share: seconds of the backwards over those of whole backwards; 1 if a backward takes no time.
    """

    name: str
    iterations: int
    workers: int
    arrival_s: float
    deadline_s: float | None
    start_s: float
    finish_s: float
    iteration_s: float
    computed_s: float
    backward_share: float

    @property
    def is_late(self) -> bool:
        """Whether it has missed its deadline."""
        return self.deadline_s is not None and self.finish_s > self.deadline_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one policy.

    Attributes:
        policy: its name.
        backward: ``full``, or ``partial`` if some worker leaves out a part.
        makespan_s, efficiency: see the module.
        utilisation: of each rank.
        backward_share: of all jobs together, by seconds.
        jobs: by number.
    """

    policy: str
    backward: str
    makespan_s: float
    efficiency: float
    utilisation: tuple[float, ...]
    backward_share: float
    jobs: tuple[JobOutcome, ...]

    @property
    def num_late(self) -> int:
        """Jobs that missed their deadline."""
        return sum(job.is_late for job in self.jobs)

    @property
    def mean_finish_s(self) -> float:
        """Mean time of a job from its arrival to its end."""
        return math.fsum(job.finish_s - job.arrival_s for job in self.jobs) / len(self.jobs)


def outcome_of(timeline: Timeline) -> Outcome:
    """The figures of a timeline."""
    makespan_s = timeline.last_s - timeline.first_s
    pieces: dict[int, list[Piece]] = {number: [] for number in range(len(timeline.jobs))}
    busy_s: list[list[float]] = [[] for _ in range(timeline.ranks)]
    for piece in timeline.pieces:
        pieces[piece.job].append(piece)
        busy_s[piece.rank].append(piece.finish_s - piece.start_s)
    finish_s = {exchange.job: exchange.finish_s for exchange in timeline.exchanges}
    jobs = tuple(_job_outcome(job, pieces[number], finish_s[number]) for number, job in enumerate(timeline.jobs))
    utilisation = tuple(math.fsum(each) / makespan_s for each in busy_s)
    return Outcome(
        policy=timeline.policy,
        backward="partial" if timeline.is_partial else "full",
        makespan_s=makespan_s,
        efficiency=math.fsum(utilisation) / timeline.ranks,
        utilisation=utilisation,
        backward_share=_ratio(_backward_s(timeline.pieces), math.fsum(_whole_backward_s(job) for job in timeline.jobs)),
        jobs=jobs,
    )


def plain_values(timeline: Timeline) -> dict[str, Any]:
    """Figures, pieces and exchanges as plain JSON values."""
    found = outcome_of(timeline)
    jobs = [asdict(job) | {"is_late": job.is_late} for job in found.jobs]
    return (
        asdict(found)
        | {"mean_finish_s": found.mean_finish_s, "num_late": found.num_late, "jobs": jobs}
        | {"pieces": [asdict(piece) for piece in timeline.pieces]}
        | {"exchanges": [asdict(exchange) for exchange in timeline.exchanges]}
    )


def _job_outcome(job: TrainingJob, pieces: list[Piece], finish_s: float) -> JobOutcome:
    start_s = pieces[0].start_s
    return JobOutcome(
        name=job.name,
        iterations=job.iterations,
        workers=job.workers,
        arrival_s=job.arrival_s,
        deadline_s=job.deadline_s,
        start_s=start_s,
        finish_s=finish_s,
        iteration_s=(finish_s - start_s) / job.iterations,
        computed_s=math.fsum(piece.finish_s - piece.start_s for piece in pieces),
        backward_share=_ratio(_backward_s(pieces), _whole_backward_s(job)),
    )


def _backward_s(pieces: Iterable[Piece]) -> float:
    return math.fsum(piece.finish_s - piece.forward_end_s for piece in pieces)


def _whole_backward_s(job: TrainingJob) -> float:
    return job.iterations * job.workers * job.backward_of_s(1.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
