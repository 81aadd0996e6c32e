"""The policies: how long a job holds a rank, and which waiting iteration is next.

    fifo     a gang for the whole job           first come
    fair     a gang for an iteration            least attained time of ranks over weight
    edf      a gang for an iteration            earliest deadline
    jigsaw   a worker for its piece             earliest deadline, then the iteration that has waited longest

A gang takes all its ranks at once and keeps them until its exchange is done: ranks whose workers are short, and all
ranks during the exchange, idle. With jigsaw a rank is free for another job as soon as its worker ends. The abstract of
JigSaw (arXiv 2111.10672) says that it schedules "at the iteration level" and knows partial backwards; the rule of its
order is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from bagpipe.jigsaw.job import TrainingJob

__all__ = ["POLICIES", "Hold", "Policy", "Waiting"]

#: Span for which a job holds a rank.
Hold = Literal["job", "iteration", "piece"]


class Waiting(Protocol):
    """A job with an iteration that has not started everywhere.

    Attributes:
        number: in the file's order.
        attained_s: seconds of ranks that it has computed, or has begun to.
        released_s: when the iteration could start.
    """

    @property
    def job(self) -> TrainingJob: ...
    @property
    def number(self) -> int: ...
    @property
    def attained_s(self) -> float: ...
    @property
    def released_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One policy.

    Attributes:
        name: as in flags.
        summary: one line.
        hold: what a rank is held for.
        order: the waiting job with the least value is next.
    """

    name: str
    summary: str
    hold: Hold
    order: Callable[[Waiting], tuple[float, ...]]


def _arrival(waiting: Waiting) -> tuple[float, ...]:
    return (waiting.job.arrival_s, waiting.number)


def _attained(waiting: Waiting) -> tuple[float, ...]:
    return (waiting.attained_s / waiting.job.weight, *_arrival(waiting))


def _deadline(waiting: Waiting) -> tuple[float, ...]:
    return (_deadline_s(waiting), *_arrival(waiting))


def _deadline_and_release(waiting: Waiting) -> tuple[float, ...]:
    return (_deadline_s(waiting), waiting.released_s, *_arrival(waiting))


def _deadline_s(waiting: Waiting) -> float:
    return math.inf if waiting.job.deadline_s is None else waiting.job.deadline_s


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(name="fifo", summary="whole jobs as gangs, first come", hold="job", order=_arrival),
        Policy(name="fair", summary="gangs by iteration, least attained first", hold="iteration", order=_attained),
        Policy(name="edf", summary="gangs by iteration, earliest deadline first", hold="iteration", order=_deadline),
        Policy(
            name="jigsaw",
            summary="workers by iteration: short ones leave their rank to the next job",
            hold="piece",
            order=_deadline_and_release,
        ),
    )
}
