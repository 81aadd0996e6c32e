"""`Planner`: the one interface of all searches for stages. A search is a function from a `Problem` to what it `Found`.

    Problem ──graphpipe | pipedream | alpa | piper──> Found ──plan: simulate, choose──> Plan

All of them use the costs of `CostModel`, so their bottlenecks can be compared. `planners` has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel

__all__ = ["Found", "Planner", "Problem", "found"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a planner decides about.

    Attributes:
        model: costs of the operators on the cluster.
        replicas: allowed replicas of a stage, ascending.
        microbatches: allowed micro-batches of a stage. Only the exact search of `graphpipe` mixes them in a partition.
        intra_operator: `alpa` divides the operators of a stage in the fastest way; False: all divide the batch.
    """

    model: CostModel
    replicas: tuple[int, ...]
    microbatches: tuple[int, ...]
    intra_operator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a planner found.

    Attributes:
        best: the layout with the least bottleneck.
        bottleneck_s: its seconds per example.
        layouts: all layouts that may have the shortest step, `best` among them.
        exact: no partition has a smaller bottleneck, to 1e-12 of it.
        relay: the stages form a chain that relays what later stages need; False: tensors go to their consumers.
    """

    best: Layout
    bottleneck_s: float
    layouts: tuple[Layout, ...]
    exact: bool = False
    relay: bool = False


#: A search; None: no partition fits the memory.
Planner = Callable[[Problem], Found | None]


def found(model: CostModel, layouts: Iterable[Layout], *, exact: bool = False) -> Found | None:
    """The record of some layouts without relays; None without a layout."""
    unique = tuple(dict.fromkeys(layouts))
    if not unique:
        return None
    # Of equal bottlenecks, the shallower.
    best = min(unique, key=lambda layout: (model.bottleneck(layout), max(model.in_flight(layout)), len(layout)))
    return Found(best=best, bottleneck_s=model.bottleneck(best), layouts=unique, exact=exact)
