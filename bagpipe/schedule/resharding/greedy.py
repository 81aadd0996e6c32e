"""`greedy`: senders, routes and order of a resharding by the loads of ports.

    if slices have several receivers, all at once, in a ring; if not, in `rounds`
    until no task is left: the broadcast that can start first, or nearly so; of several, the one whose ports have most
    left to do; of several, at random (seeded), many times over ──simulate──> the least time, `send_to_all` among them

So the choice is never slower than `send_to_all`, as the simulator says.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.layouts import Layout
from bagpipe.schedule.resharding.loads import Loads
from bagpipe.schedule.resharding.plan import Broadcast, Resharding, send_to_all
from bagpipe.schedule.resharding.rounds import rounds
from bagpipe.schedule.resharding.simulate import Clock, simulate
from bagpipe.schedule.resharding.tasks import UnitTask, unit_tasks

__all__ = ["broadcasts_of", "greedy"]

#: Orders that are tried for each kind of route; random after the first.
_TRIES = 8
#: Starts are compared in steps of this many slices of mean size. 0 alone takes a slice that is a row shorter before the
#: one that its port waits for: 1.32 times the least time from 3 ranks' rows to 3 ranks' columns of [1024, 256].
_GRAINS = (0.0, 1.0)
#: Chunks of slices that all travel at once.
_RING_CHUNKS = (1, 2, 4)
#: Most chunks of a slice. With 16 the last rank of a route of six is a third of the slice's time later than the first.
_MAX_CHUNKS = 32


def greedy(
    source: Layout, target: Layout, rows: int, columns: int, network: Network, *, element_bytes: int = 4, seed: int = 0
) -> Resharding:
    """A resharding with a short time.

    Args:
        source, target: the layouts.
        rows, columns: of the whole tensor.
        network: of the ranks of both layouts.
        element_bytes: size of an element.
        seed: of the random choices. Equal arguments give equal reshardings, in every process.
    """
    tasks = unit_tasks(source, target, rows, columns)
    loads = Loads.of(tasks, network, element_bytes)
    least_s = loads.bound_s({})
    best, best_s = None, math.inf
    for order, in_turns in _orders(tasks, loads, random.Random(seed)):
        found = Resharding(
            source=source, target=target, rows=rows, columns=columns, broadcasts=order, in_turns=in_turns
        )
        makespan_s = simulate(found, network, element_bytes=element_bytes).makespan_s
        if makespan_s < best_s:
            best, best_s = found, makespan_s
        if best_s <= least_s * (1 + 1e-9):
            break
    plain = send_to_all(source, target, rows, columns)
    plain_s = simulate(plain, network, element_bytes=element_bytes).makespan_s
    return best if best is not None and best_s <= plain_s else plain


def _orders(
    tasks: tuple[UnitTask, ...], loads: Loads, chance: random.Random
) -> Iterator[tuple[tuple[Broadcast, ...], bool]]:
    """Orders to try, and whether they are in turns."""
    is_shared = any(len(task.receivers) > 1 for task in tasks)
    if not is_shared:
        yield tuple(broadcasts_of(tasks[n], sender, loads)[0] for n, sender in rounds(tasks, loads)), False
    mean_s = sum(map(loads.seconds, tasks)) / max(1, len(tasks))
    for number in range(_TRIES):
        if is_shared and number < len(_RING_CHUNKS):
            yield _ring(tasks, loads, _RING_CHUNKS[number]), True
        for relays, grain in itertools.product((True, False) if is_shared else (False,), _GRAINS):
            random_or_not = chance if number else None
            yield _order(tasks, loads, relays=relays, grain_s=grain * mean_s, chance=random_or_not), False


def _ring(tasks: tuple[UnitTask, ...], loads: Loads, chunks: int) -> tuple[Broadcast, ...]:
    """All tasks at once, each with another host at the beginning of its route: slices go round the hosts."""
    host = loads.network.host
    chosen = [task.sources[number % len(task.sources)] for number, task in enumerate(tasks)]
    sources = list(dict.fromkeys(map(host, chosen)))
    found: list[tuple[int, int, Broadcast]] = []
    counts = dict.fromkeys(sources, 0)
    for task, sender in zip(tasks, chosen, strict=True):
        route, place = _route(task, sender, loads), sources.index(host(sender))
        hosts = list(dict.fromkeys(map(host, route)))
        start = place if len(sources) >= len(hosts) else place * len(hosts) // len(sources)
        start = (start + counts[host(sender)]) % len(hosts)
        first = next(n for n, rank in enumerate(route) if host(rank) == hosts[start])
        pieces = min(chunks, task.box.elements)
        broadcast = Broadcast(task=task, sender=sender, route=route[first:] + route[:first], chunks=pieces)
        found.append((counts[host(sender)], len(found), broadcast))
        counts[host(sender)] += 1
    return tuple(broadcast for *_, broadcast in sorted(found, key=lambda each: each[:2]))


def _order(
    tasks: tuple[UnitTask, ...], loads: Loads, *, relays: bool, grain_s: float, chance: random.Random | None
) -> tuple[Broadcast, ...]:
    """One order: what can start first comes first; ties by the loads that are left, then by chance."""
    left, loads = dict(enumerate(tasks)), loads.copy()
    clock = Clock(network=loads.network, element_bytes=loads.element_bytes)
    found: list[Broadcast] = []
    while left:
        keys = []
        for number, task in left.items():
            ways_in = loads.ways_in(task)
            into_s = max((loads.port_s.get(port, 0.0) for port in ways_in), default=0.0)
            for place, sender in enumerate(task.sources):
                out = (*loads.network.host(sender), "out")
                out_s = loads.port_s.get(out, 0.0)
                start_s = max(clock.free_s.get(port, 0.0) for port in (out, *ways_in))
                # A task with one source needs its port; one with several takes the port that has least to do.
                critical_s = max(into_s, out_s) if len(task.sources) == 1 else into_s - out_s
                tie = chance.random() if chance else (place - number) % len(task.sources)
                if grain_s:
                    start_s = round(start_s / grain_s)
                keys.append((start_s, -critical_s, tie, number, sender))
        *_, number, sender = min(keys)
        task = left.pop(number)
        loads.change(task, -1)
        found.append(next(each for each in broadcasts_of(task, sender, loads) if each.relays == relays))
        clock.append(found[-1])
    return tuple(found)


def broadcasts_of(task: UnitTask, sender: int, loads: Loads) -> tuple[Broadcast, ...]:
    """The broadcasts of a task from a sender: without relays, and relayed in chunks.

    A route goes host by host, the sender's first, so the slice enters each host once.
    """
    route = _route(task, sender, loads)
    direct = Broadcast(task=task, sender=sender, route=route, relays=False)
    return direct, Broadcast(task=task, sender=sender, route=route, chunks=_chunks(task, loads))


def _route(task: UnitTask, sender: int, loads: Loads) -> tuple[int, ...]:
    """The receivers, host by host: those of the sender's host first."""
    host = loads.network.host
    places = {own: place for place, own in enumerate(dict.fromkeys(map(host, task.receivers)))}
    return tuple(sorted(task.receivers, key=lambda rank: (host(rank) != host(sender), places[host(rank)])))


def _chunks(task: UnitTask, loads: Loads) -> int:
    """Chunks for the least time of one route: c messages take c m, and each relay waits for one chunk, s / c.

    (c + k - 1) (m + s / c) is least at c = sqrt((k - 1) s / m), for k receivers, messages of m and s seconds of bytes.
    """
    relays = len(task.receivers) - 1
    if not relays:
        return 1
    network = loads.network
    bytes_s = task.box.elements * loads.element_bytes / network.bandwidth_bytes_per_s
    best = math.sqrt(relays * bytes_s / network.message_s) if network.message_s else math.inf
    return max(1, min(_MAX_CHUNKS, task.box.elements, round(min(best, _MAX_CHUNKS))))
