"""`Loads`: how long the unit tasks of a resharding keep each port at least, and so how long all of it takes at least.

    a slice enters the host of each receiver once, unless a source is there          port of the host, in
    it leaves one of its sources' hosts once                                         port of that host, out

If n ports share k n + 1 slices, one port has k + 1. The bound holds for any senders, routes, chunks and order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bagpipe.cluster.network import Network, Port
from bagpipe.schedule.resharding.tasks import UnitTask

__all__ = ["Loads"]


@dataclass(slots=True, kw_only=True)
class Loads:
    """Least time that unit tasks still keep each port.

    Attributes:
        network: the network.
        element_bytes: size of an element.
        port_s: port -> time of the tasks that use no other.
        shared_s: time of the tasks that choose among several ports out.
        choices: the ports out of all tasks.
        crowd_s: least time of the port that has most of the tasks that choose; of all tasks of `of`.
    """

    network: Network
    element_bytes: int
    port_s: dict[Port, float] = field(default_factory=dict)
    shared_s: float = 0.0
    choices: frozenset[Port] = frozenset()
    crowd_s: float = 0.0

    @classmethod
    def of(cls, tasks: Sequence[UnitTask], network: Network, element_bytes: int) -> Loads:
        """The loads of all `tasks`."""
        loads = cls(network=network, element_bytes=element_bytes)
        for task in tasks:
            loads.change(task, 1)
            loads.choices |= loads.ways_out(task)
        free = [loads.seconds(task) for task in tasks if len(loads.ways_out(task)) > 1]
        free.sort(reverse=True)
        for end in range(1, len(free) + 1, max(1, len(loads.choices))):
            each = (end - 1) // len(loads.choices) + 1
            loads.crowd_s = max(loads.crowd_s, sum(free[end - each : end]))
        return loads

    def copy(self) -> Loads:
        """Loads of their own."""
        return Loads(
            network=self.network,
            element_bytes=self.element_bytes,
            port_s=dict(self.port_s),
            shared_s=self.shared_s,
            choices=self.choices,
            crowd_s=self.crowd_s,
        )

    def change(self, task: UnitTask, sign: int) -> None:
        """Add a task (sign 1), or take it away (sign -1)."""
        ways_out = self.ways_out(task)
        if not ways_out:
            return
        seconds = sign * self.seconds(task)
        for port in self.ways_in(task):
            self.port_s[port] = self.port_s.get(port, 0.0) + seconds
        if len(ways_out) > 1:
            self.shared_s += seconds
        else:
            for port in ways_out:
                self.port_s[port] = self.port_s.get(port, 0.0) + seconds

    def seconds(self, task: UnitTask) -> float:
        """Least time of a task's slice in a port between hosts."""
        network = self.network
        return network.message_s + task.box.elements * self.element_bytes / network.bandwidth_bytes_per_s

    def ways_in(self, task: UnitTask) -> frozenset[Port]:
        """The ports into hosts that have a receiver and no source."""
        sources = {self.network.host(rank) for rank in task.sources}
        return frozenset((*host, "in") for rank in task.receivers if (host := self.network.host(rank)) not in sources)

    def ways_out(self, task: UnitTask) -> frozenset[Port]:
        """The ports by which the slice can leave a source's host; empty: it does not have to."""
        if not self.ways_in(task):
            return frozenset()
        return frozenset((*self.network.host(rank), "out") for rank in task.sources)

    def bound_s(self, free_s: Mapping[Port, float], since_s: float = 0.0) -> float:
        """Least time of the last arrival.

        Args:
            free_s: port -> when it is free.
            since_s: nothing starts before.
        """
        ends = [max(free_s.get(port, 0.0), since_s) + load for port, load in self.port_s.items() if load > 0]
        if self.shared_s > 0:
            begun = sum(max(free_s.get(port, 0.0), since_s) for port in self.choices)
            fixed = sum(self.port_s.get(port, 0.0) for port in self.choices)
            ends.append((begun + fixed + self.shared_s) / len(self.choices))
        return max(max(ends), self.crowd_s) + self.network.latency_s if ends else 0.0
