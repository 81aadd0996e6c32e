"""Cycles of a loop's dependencies: `delay_free_cycle` finds a deadlock, `positive_cycle` the cycle of a given weight.

Both search longest paths with Bellman-Ford; a path that still grows after as many rounds as nodes contains the cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bagpipe.schedule.ir.loop import Loop, LoopDependency

__all__ = ["delay_free_cycle", "positive_cycle"]


def delay_free_cycle(loop: Loop) -> tuple[int, ...]:
    """Template numbers of a cycle whose delays do not sum to a positive number; empty if every cycle is live."""
    dependencies = loop.dependencies()
    size = len(loop.templates)
    # A cycle has at most `size` edges, so the sum of 1 - turns * (size + 1) is positive exactly if its turns are <= 0.
    weights = [Fraction(1 - d.turns * (size + 1)) for d in dependencies]
    # From waiter to what it waits for, the order of error messages.
    return tuple(d.dst for d in reversed(positive_cycle(dependencies, weights, size)))


def positive_cycle(
    dependencies: Sequence[LoopDependency], weights: Sequence[Fraction], size: int
) -> Sequence[LoopDependency]:
    """A cycle of positive total weight, in execution order; empty if there is none.

    Args:
        dependencies: edges between templates.
        weights: per dependency.
        size: number of templates.
    """
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
    """The cycle behind `node`, which `size` steps back are sure to reach."""

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
