"""`least_bottleneck`: the best layout by bisection over target times, given a feasibility search.

target ──solve──> layout or None       the upper end becomes the bottleneck of the layout found, not the target
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bagpipe.partition.cost import Placed

__all__ = ["Layout", "least_bottleneck", "probes"]

#: Stages in topological order.
Layout = tuple[Placed, ...]

#: Relative width at which bisection ends. Then targets just below the bottleneck are probed until one fails.
_WIDTH = 1e-4
_BELOW = 1e-12


def probes(
    bottleneck: Callable[[Layout], float], solve: Callable[[float], Layout | None], *, exact: bool = True
) -> Iterator[Layout]:
    """Layouts with decreasing bottlenecks; the last is the best that `solve` finds.

    Args:
        bottleneck: layout -> time per example of its slowest stage.
        solve: target -> a layout whose stages all meet it, or None; monotone in the target.
        exact: end when nothing is better than the last layout by 1e-12 of it; False: when the interval is small.
    """
    found = solve(float("inf"))
    if found is None:
        return
    yield found
    low, high = 0.0, bottleneck(found)
    while high > 0:
        last = high - low <= _WIDTH * high
        if last and not exact:
            return
        target = high * (1 - _BELOW) if last else (low + high) / 2
        found = solve(target)
        if found is not None:
            yield found
            high = bottleneck(found)
        elif last:
            return
        else:
            low = target


def least_bottleneck(bottleneck: Callable[[Layout], float], solve: Callable[[float], Layout | None]) -> Layout | None:
    """The best layout that `solve` finds, or None."""
    best = None
    for best in probes(bottleneck, solve):  # noqa: B007  (the last one is wanted)
        pass
    return best
