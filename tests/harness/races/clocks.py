"""`Clock`: a vector clock. Its agents are streams and host threads.

op of agent a ──tick──> a's own time          b waits for an event of a ──join──> b knows what a's event knew

Fidge 1988, Mattern 1989: an op at time t of agent a happened before every op whose clock covers (a, t).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Agent", "Clock"]


class Clock:
    """The latest known time of every agent; 0: none."""

    __slots__ = ("_times",)

    def __init__(self, times: dict[int, int] | None = None) -> None:
        self._times = times if times is not None else {}

    def copy(self) -> Clock:
        return Clock(dict(self._times))

    def join(self, other: Clock) -> None:
        """Merge `other` into this clock."""
        times = self._times
        for agent, time in other._times.items():
            if time > times.get(agent, 0):
                times[agent] = time

    def advance(self, agent: int) -> int:
        """Advance the agent's own time and return it."""
        time = self._times[agent] = self._times.get(agent, 0) + 1
        return time

    def knows(self, agent: int, time: int) -> bool:
        return time <= self._times.get(agent, 0)

    def covers(self, other: Clock) -> bool:
        """Whether this clock covers everything in `other`."""
        return all(self.knows(agent, time) for agent, time in other._times.items())

    def limits(self, num_agents: int) -> NDArray[np.int64]:
        """int64 ``[num_agents]``: the latest known time of each agent."""
        limits = np.zeros(num_agents, dtype=np.int64)
        for agent, time in self._times.items():
            limits[agent] = time
        return limits


@dataclass(slots=True, eq=False)
class Agent:
    """A sequential executor of ops.

    Attributes:
        number: 1, 2, …
        name: in reports.
        clock: what it knows, its own last op included.
    """

    number: int
    name: str
    clock: Clock = field(default_factory=Clock)
