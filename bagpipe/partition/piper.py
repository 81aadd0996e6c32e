"""Piper's program over downsets: the least bottleneck of all partitions of a small graph.

    least[I, k] = min over I' ⊂ I, d <= k of max(least[I', k - d], time of I \\ I' on d replicas)

I is a set of operators that contains their consumers: what is placed already, from the end of the model. A stage whose
replicas d are among the k devices from it to the end keeps ``ceil(k / d)`` micro-batches per replica (Tarnawski et al.,
NeurIPS 2021). The reference for other planners: it tries every partition, but the sets of wide graphs are too many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.cuts import MOST_SETS, closed_sets
from bagpipe.partition.planner import Found, Problem

__all__ = ["PiperSearch", "piper"]


def piper(problem: Problem) -> Found | None:
    """The best partition for each number of micro-batches; None too if the graph has too many downsets."""
    sets = closed_sets(problem.model.graph, MOST_SETS)
    if sets is None:
        return None
    model = problem.model
    best = [PiperSearch(model, problem.replicas, count, sets).solve() for count in problem.microbatches]
    layouts = {layout: model.bottleneck(layout) for layout in best if layout is not None}
    if not layouts:
        return None
    least = min(layouts, key=lambda layout: (layouts[layout], len(layout)))
    return Found(
        best=least, bottleneck_s=layouts[least], layouts=tuple(layouts), exact=model.cluster.memory_bytes == math.inf
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """The best placement of a downset: its bottleneck, and the stage placed last, as a linked list."""

    bottleneck_s: float
    stage: Placed | None = None
    rest: _Entry | None = None

    def layout(self) -> Layout:
        stages, entry = [], self
        while entry.stage is not None and entry.rest is not None:
            stages.append(entry.stage)
            entry = entry.rest
        return tuple(stages)


class PiperSearch:
    """The program for one number of micro-batches.

    Args:
        model: the cost model.
        replicas: allowed replica counts of a stage.
        microbatches: micro-batches per batch of every stage.
        sets: from `closed_sets`.
    """

    def __init__(self, model: CostModel, replicas: tuple[int, ...], microbatches: int, sets: tuple[int, ...]) -> None:
        self.model = model
        self.replicas = [count for count in replicas if count <= model.cluster.devices]
        self.microbatches = microbatches
        self.sets = sets

    def solve(self) -> Layout | None:
        """The layout with the least bottleneck, or None."""
        devices = self.model.cluster.devices
        least: dict[int, list[_Entry | None]] = {mask: [None] * (devices + 1) for mask in self.sets}
        least[0][0] = _Entry(0.0)
        for number, placed in enumerate(self.sets):
            if not any(least[placed]):
                continue
            for larger in self.sets[number + 1 :]:
                if placed & ~larger:
                    continue
                for replicas in self.replicas:
                    self._extend(least[placed], least[larger], larger & ~placed, replicas)
        complete = [entry for entry in least[self.sets[-1]] if entry is not None]
        return min(complete, key=lambda entry: entry.bottleneck_s).layout() if complete else None

    def _extend(self, entries: list[_Entry | None], into: list[_Entry | None], mask: int, replicas: int) -> None:
        """Put a stage in front of the placements of a downset, by the number of their devices."""
        totals = self.model.totals(mask)
        time_s = self.model.time_per_example(totals, replicas, self.microbatches)
        for used, entry in enumerate(entries[: len(entries) - replicas]):
            if entry is None:
                continue
            old = into[used + replicas]
            bottleneck_s = max(entry.bottleneck_s, time_s)
            if old is not None and old.bottleneck_s <= bottleneck_s:
                continue
            if self.fits(mask, replicas, used + replicas):
                into[used + replicas] = _Entry(bottleneck_s, Placed(mask, replicas, self.microbatches), entry)

    def fits(self, mask: int, replicas: int, devices: int) -> bool:
        """Whether a stage fits with `devices` devices from it to the end, its own among them."""
        in_flight = min(self.microbatches, math.ceil(devices / replicas))
        examples = -(in_flight * self.model.batch_examples // -self.microbatches)
        return self.model.fits(self.model.totals(mask), replicas, examples)
