"""`least_bottleneck`: from "can every stage keep to this time?" to the best time, by halving the interval.

target ──solve──> layout or None       a found layout's own bottleneck, not the target, becomes the upper end
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bagpipe.partition.cost import Placed

__all__ = ["Layout", "least_bottleneck", "probes"]

#: Stages in topological order of what feeds what.
Layout = tuple[Placed, ...]

#: Relative width at which halving ends; then the found bottleneck is probed just below until nothing better is found.
_WIDTH = 1e-4
_BELOW = 1e-12


def probes(
    bottleneck: Callable[[Layout], float], solve: Callable[[float], Layout | None], *, exact: bool = True
) -> Iterator[Layout]:
    """Layouts with ever smaller bottlenecks; the last is the best `solve` can find.

    Args:
        bottleneck: a layout's slowest time per example.
        solve: a layout whose stages all keep to a time per example, or None; must not fail for a larger time.
        exact: end only when nothing better than the last one (by 1e-12 of it) is found; else when the interval is
            small.
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
    """The best layout `solve` can find, or None if it finds none at all."""
    best = None
    for best in probes(bottleneck, solve):  # noqa: B007  (the last one is wanted)
        pass
    return best
