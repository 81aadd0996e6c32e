"""`simulate`: times of a resharding's messages on a network.

    messages ──in order──> Clock: when each port is free, when each rank has each element ──> Timeline

A message starts when both its ports are free, in the order of the messages, and its sender has its elements. One pass
over the messages gives all times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bagpipe.cluster.network import Network, Port
from bagpipe.schedule.resharding.plan import Broadcast, Message, Resharding

__all__ = ["Clock", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of the messages, in seconds from the start.

    Attributes:
        starts, ends: of each message: its ports are busy from start to end; it arrives a latency later.
        makespan_s: the last arrival; 0 without messages.
        busy_s: port -> time it is busy.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    makespan_s: float
    busy_s: Mapping[Port, float]


@dataclass(slots=True, kw_only=True)
class Clock:
    """The state of a network while broadcasts are added, one after the other.

    Attributes:
        network: the network.
        element_bytes: size of an element.
        free_s: port -> when it is free; 0 for a port that is not listed.
        makespan_s: the last arrival so far.
    """

    network: Network
    element_bytes: int
    free_s: dict[Port, float] = field(default_factory=dict)
    makespan_s: float = 0.0

    def copy(self) -> Clock:
        """A clock of its own at the same time."""
        return Clock(
            network=self.network,
            element_bytes=self.element_bytes,
            free_s=dict(self.free_s),
            makespan_s=self.makespan_s,
        )

    def start_s(self, sender: int, receiver: int) -> float:
        """When a message of elements that the sender has from the beginning could start."""
        return max(self.free_s.get(port, 0.0) for port in self.network.ports(sender, receiver))

    def add(self, messages: Iterable[Message]) -> list[tuple[float, float]]:
        """Add the messages of whole broadcasts; their starts and ends."""
        arrivals: dict[tuple[int, int, int], float] = {}  # of a broadcast's chunk at a rank
        times = []
        for message in messages:
            out, into = self.network.ports(message.sender, message.receiver)
            busy_s = self.network.busy_s(message.sender, message.receiver, message.elements * self.element_bytes)
            start_s = max(
                self.free_s.get(out, 0.0),
                self.free_s.get(into, 0.0),
                arrivals.get((message.broadcast, message.sender, message.first), 0.0),
            )
            end_s = start_s + busy_s
            self.free_s[out] = self.free_s[into] = end_s
            arrival_s = end_s + self.network.delay_s(message.sender, message.receiver)
            arrivals[message.broadcast, message.receiver, message.first] = arrival_s
            self.makespan_s = max(self.makespan_s, arrival_s)
            times.append((start_s, end_s))
        return times

    def append(self, broadcast: Broadcast) -> None:
        """Add a whole broadcast."""
        self.add(broadcast.messages(0))


def simulate(resharding: Resharding, network: Network, *, element_bytes: int = 4) -> Timeline:
    """Simulate a resharding.

    Args:
        resharding: the broadcasts and their order.
        network: of the ranks of both layouts.
        element_bytes: size of an element.
    """
    clock = Clock(network=network, element_bytes=element_bytes)
    messages = resharding.messages()
    times = clock.add(messages)
    busy_s: dict[Port, float] = {}
    for message, (start_s, end_s) in zip(messages, times, strict=True):
        for port in network.ports(message.sender, message.receiver):
            busy_s[port] = busy_s.get(port, 0.0) + end_s - start_s
    return Timeline(
        starts=tuple(start for start, _ in times),
        ends=tuple(end for _, end in times),
        makespan_s=clock.makespan_s,
        busy_s=busy_s,
    )
