"""`search`: the order and senders of a resharding with the least time, by branch and bound.

    broadcasts so far ──append each task that is left, from each sender, by each route──> more of them
                      └─ Loads.bound_s >= the best time so far ─> cut off

It serves to judge `greedy`: with six ranks on each side it may end at its limit, and then gives a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.greedy import broadcasts_of, greedy
from bagpipe.schedule.resharding.layouts import Layout
from bagpipe.schedule.resharding.loads import Loads
from bagpipe.schedule.resharding.plan import Broadcast, Resharding
from bagpipe.schedule.resharding.simulate import Clock, simulate
from bagpipe.schedule.resharding.tasks import UnitTask, unit_tasks

__all__ = ["Searched", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Result of the search.

    Attributes:
        resharding: the best one found.
        makespan_s: its time.
        bound_s: no resharding has a shorter time: the makespan itself where the search has ended.
        nodes: partial orders visited.
    """

    resharding: Resharding
    makespan_s: float
    bound_s: float
    nodes: int


def search(
    source: Layout,
    target: Layout,
    rows: int,
    columns: int,
    network: Network,
    *,
    element_bytes: int = 4,
    limit: int = 20_000,
) -> Searched:
    """The resharding with the least time among all orders, senders and routes of `broadcasts_of`.

    Args:
        source, target: the layouts.
        rows, columns: of the whole tensor.
        network: of the ranks of both layouts.
        element_bytes: size of an element.
        limit: most partial orders to visit.
    """
    tasks = unit_tasks(source, target, rows, columns)
    first = greedy(source, target, rows, columns, network, element_bytes=element_bytes)
    loads = Loads.of(tasks, network, element_bytes)
    found = _Search(
        tasks=tasks,
        best=first.broadcasts,
        best_s=simulate(first, network, element_bytes=element_bytes).makespan_s,
        least_s=loads.bound_s({}),
        limit=limit,
        is_sorted=all(len(task.receivers) == 1 for task in tasks),
    )
    found.visit((1 << len(tasks)) - 1, (), Clock(network=network, element_bytes=element_bytes), loads, 0.0)
    return Searched(
        resharding=Resharding(source=source, target=target, rows=rows, columns=columns, broadcasts=found.best),
        makespan_s=found.best_s,
        bound_s=found.best_s if found.nodes < limit else min(found.best_s, found.least_s),
        nodes=found.nodes,
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """The state of a search.

    Attributes:
        tasks: all unit tasks.
        best, best_s: the best broadcasts and their time.
        least_s: bound for all orders.
        limit: most nodes.
        is_sorted: each broadcast is one message, so orders can be visited by rising starts alone.
        nodes: visited.
        seen: states that were visited.
    """

    tasks: tuple[UnitTask, ...]
    best: tuple[Broadcast, ...]
    best_s: float
    least_s: float
    limit: int
    is_sorted: bool
    nodes: int = 0
    seen: set[object] | None = None

    def visit(self, left: int, done: tuple[Broadcast, ...], clock: Clock, loads: Loads, since_s: float) -> None:
        """Visit all orders that begin with `done`.

        Args:
            left: bit per task that is left.
            done: broadcasts so far.
            clock: the network after them.
            loads: of the tasks that are left.
            since_s: start of the last broadcast.
        """
        if not left:
            if clock.makespan_s < self.best_s:
                self.best, self.best_s = done, clock.makespan_s
            return
        for bound_s, start_s, number, broadcast, after in self._children(left, clock, loads, since_s):
            if self.nodes >= self.limit or self.best_s <= self.least_s * (1 + 1e-12):
                return
            if bound_s >= self.best_s * (1 - 1e-12):
                continue
            self.nodes += 1
            rest = loads.copy()
            rest.change(self.tasks[number], -1)
            self.visit(left & ~(1 << number), (*done, broadcast), after, rest, start_s)

    def _children(
        self, left: int, clock: Clock, loads: Loads, since_s: float
    ) -> list[tuple[float, float, int, Broadcast, Clock]]:
        """(bound, start, task, broadcast, clock after it) of each way to go on, the most promising first."""
        found = []
        for number, task in enumerate(self.tasks):
            if not left >> number & 1:
                continue
            rest = loads.copy()
            rest.change(task, -1)
            for sender in task.sources:
                for broadcast in broadcasts_of(task, sender, loads)[: len(task.receivers)]:
                    start_s = clock.start_s(sender, broadcast.route[0])
                    if self.is_sorted and start_s < since_s * (1 - 1e-12):
                        continue
                    after = clock.copy()
                    after.append(broadcast)
                    bound_s = max(after.makespan_s, rest.bound_s(after.free_s, start_s if self.is_sorted else 0.0))
                    if bound_s >= self.best_s * (1 - 1e-12):
                        continue
                    key = (left, number, tuple(sorted(after.free_s.items())))
                    if self._is_known(key):
                        continue
                    found.append((bound_s, start_s, number, broadcast, after))
        return sorted(found, key=lambda child: child[:3])

    def _is_known(self, key: object) -> bool:
        """Whether a state was reached before; if not, it is kept."""
        if self.seen is None:
            self.seen = set()
        known = key in self.seen
        self.seen.add(key)
        return known
