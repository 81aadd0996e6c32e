"""How fast a loop can go, without simulating it: its steady-state period is the maximum cycle ratio.

    period = max over cycles of (cost of the cycle's actions) / (batches of delay on the cycle)

(Reiter 1968; Ramamoorthy and Ho 1980.) A lane's own order is a cycle of delay 1, so the period is at least the load of
the busiest lane; capacity and hazard edges add cycles that pass through several lanes. The search starts from a guess
and raises it to the ratio of any cycle that beats it, until none does (Lawler 1976): exact when costs are ints or
Fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.loop import Loop, LoopDependency, Template
from bagpipe.schedule.ir.ops import OPS

__all__ = ["Period", "delay_free_cycle", "period"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Time per batch in steady state, and the cycle of templates (lane, text) that sets it."""

    value: Fraction
    cycle: tuple[tuple[str, str], ...]


def default_cost(template: Template) -> int:
    """The op's cost from the table."""
    return OPS[template.op].cost


def period(loop: Loop, cost: Callable[[Template], float] = default_cost) -> Period:
    """The steady-state time per batch of a live loop with constant costs and no latency.

    Args:
        loop: hazards count with their constant delay, or not at all.
        cost: template -> duration, at least 0.

    Raises:
        ScheduleError: the loop deadlocks.
    """
    blocked = delay_free_cycle(loop)
    if blocked:
        raise ScheduleError(f"deadlock: {' waits for '.join(loop.templates[n][1].text for n in blocked)}")
    dependencies = loop.dependencies()
    costs = [Fraction(cost(template)) for _, template in loop.templates]
    ratio, best = Fraction(0), ()  # type: tuple[Fraction, Sequence[LoopDependency]]
    while True:
        cycle = _positive_cycle(dependencies, [costs[d.src] - ratio * d.turns for d in dependencies], len(costs))
        if not cycle:
            names = tuple((loop.templates[d.src][0], loop.templates[d.src][1].text) for d in best)
            return Period(value=ratio, cycle=names)
        best = cycle
        ratio = Fraction(sum(costs[d.src] for d in cycle)) / sum(d.turns for d in cycle)


def delay_free_cycle(loop: Loop) -> tuple[int, ...]:
    """Template numbers of a cycle whose delays do not add up to a positive number; empty if every cycle is live."""
    dependencies = loop.dependencies()
    size = len(loop.templates)
    # A cycle has at most `size` edges, so 1 - turns * (size + 1) is positive in sum exactly if its turns are <= 0.
    weights = [Fraction(1 - d.turns * (size + 1)) for d in dependencies]
    # From waiter to what it waits for, as a deadlock is told.
    return tuple(d.dst for d in reversed(_positive_cycle(dependencies, weights, size)))


def _positive_cycle(
    dependencies: Sequence[LoopDependency], weights: Sequence[Fraction], size: int
) -> Sequence[LoopDependency]:
    """A cycle of positive total weight, in execution order, or nothing (Bellman-Ford on longest paths)."""
    longest = [Fraction(0)] * size
    came_by: list[LoopDependency | None] = [None] * size
    last = None
    for _ in range(size + 1):
        last = None
        for dependency, weight in zip(dependencies, weights, strict=True):
            if longest[dependency.src] + weight > longest[dependency.dst]:
                longest[dependency.dst] = longest[dependency.src] + weight
                came_by[dependency.dst] = dependency
                last = dependency.dst
        if last is None:
            return ()
    return _walk_back(came_by, size, last)


def _walk_back(came_by: Sequence[LoopDependency | None], size: int, node: int | None) -> list[LoopDependency]:
    """The cycle behind `node`: after `size` steps back the walk is certainly on it."""

    def before(at: int) -> LoopDependency:
        step = came_by[at]
        assert step is not None, "a node improved in the last round has a predecessor"
        return step

    assert node is not None
    for _ in range(size):
        node = before(node).src
    cycle, at = [before(node)], before(node).src
    while at != node:
        cycle.append(before(at))
        at = before(at).src
    return cycle[::-1]
