"""`rounds`: unit tasks with one receiver each, in rounds in which no two of them use the same port.

    every round: the ports with most left to do, first; each gets a task if an augmenting path leads to one

If all slices are alike, the number of rounds is the largest number of slices of a port (König's theorem on the edges of
bipartite graphs): no port with that many is ever idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.cluster.network import Port
from bagpipe.schedule.resharding.loads import Loads
from bagpipe.schedule.resharding.tasks import UnitTask

__all__ = ["rounds", "senders"]


def senders(tasks: Sequence[UnitTask], loads: Loads) -> list[int]:
    """A sender for each task: the longest first, from the source whose port has least to do so far."""
    busy_s: dict[Port, float] = {}
    chosen = [task.sources[0] for task in tasks]
    order = sorted(range(len(tasks)), key=lambda n: (len(tasks[n].sources) > 1, -tasks[n].box.elements, n))
    for number in order:
        task = tasks[number]
        ports = {rank: loads.network.ports(rank, task.receivers[0])[0] for rank in task.sources}
        chosen[number] = min(task.sources, key=lambda rank: busy_s.get(ports[rank], 0.0))
        port = ports[chosen[number]]
        busy_s[port] = busy_s.get(port, 0.0) + loads.seconds(task)
    return chosen


def rounds(tasks: Sequence[UnitTask], loads: Loads) -> list[tuple[int, int]]:
    """(task, sender), round by round.

    Args:
        tasks: each with one receiver.
        loads: of the tasks.
    """
    chosen = senders(tasks, loads)
    left: dict[Port, dict[Port, list[int]]] = {}  # port out -> port in -> its tasks, and the other way round
    load_s: dict[Port, float] = {}
    for number, task in enumerate(tasks):
        ends = loads.network.ports(chosen[number], task.receivers[0])
        for port, other in (ends, ends[::-1]):
            left.setdefault(port, {}).setdefault(other, []).append(number)
            load_s[port] = load_s.get(port, 0.0) + loads.seconds(task)
    found: list[tuple[int, int]] = []
    while len(found) < len(tasks):
        order = sorted(left, key=lambda port: -load_s[port])
        pairs: dict[Port, Port] = {}
        for port in order:
            if port not in pairs:
                _match(port, left, {each: place for place, each in enumerate(order)}, pairs, set())
        for out, into in pairs.items():
            if out[2] == "in":
                continue
            number = left[out][into].pop(0)
            left[into][out].remove(number)
            found.append((number, chosen[number]))
            for port in (out, into):
                load_s[port] -= loads.seconds(tasks[number])
    return found


def _match(
    port: Port,
    left: dict[Port, dict[Port, list[int]]],
    places: dict[Port, int],
    pairs: dict[Port, Port],
    seen: set[Port],
) -> bool:
    """Give a port a partner, moving others to new partners; no port loses its partner for good."""
    for other in sorted((other for other, tasks in left[port].items() if tasks), key=places.__getitem__):
        if other in seen:
            continue
        seen.add(other)
        if other not in pairs or _match(pairs[other], left, places, pairs, seen):
            pairs[port], pairs[other] = other, port
            return True
    return False
