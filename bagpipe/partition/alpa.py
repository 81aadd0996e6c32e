"""Alpa's program between operators: stages on submeshes with the least sum of times plus (M - 1) times the longest.

    step = sum of the stages' micro-batches + (M - 1) times the longest        M micro-batches, a chain of stages
    least[s, k, d; t] = min over runs k..i and submeshes n of time(k..i, n) + least[s - 1, i, d - n; t]
                        with time <= t                                         for t in ascending order

A submesh is 1, 2, 4, … devices of one host, or whole hosts (Zheng et al., OSDI 2022, section 5). A stage with s - 1
stages after it keeps min(s, M) micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bagpipe.partition.bisect import Layout
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Placed
from bagpipe.partition.intra_operator import SplitSearch
from bagpipe.partition.planner import Found, Problem

__all__ = ["MOST_LAYERS", "Total", "alpa", "least_total", "submeshes"]

#: Operators are grouped into at most so many layers, as in the paper, whose program takes the cube of their number.
MOST_LAYERS = 24
#: Longest stage times that are tried, about, where layers hold several operators.
_MOST_TARGETS = 32


def submeshes(host_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of devices that a stage can get: powers of two below a host, and whole hosts."""
    host = max(host_sizes)
    inside = [1 << bits for bits in range(host.bit_length()) if 1 << bits < host]
    return (*inside, *(host * hosts for hosts in range(1, sum(host_sizes) // host + 1)))


def alpa(problem: Problem) -> Found | None:
    """The chain with the least step time under Alpa's objective, per number of micro-batches."""
    model = problem.model
    allowed = sorted(set(problem.replicas) & set(submeshes(model.cluster.host_sizes)))
    totals: dict[Layout, tuple[float, float]] = {}
    for count in problem.microbatches if allowed else ():
        found = least_total(ChainSearch(model, allowed, count), intra_operator=problem.intra_operator)
        if found is not None:
            totals[found.layout] = found.total_s, found.bottleneck_s
    if not totals:
        return None
    best = min(totals, key=lambda layout: totals[layout])
    return Found(best=best, bottleneck_s=totals[best][1], layouts=tuple(totals), relay=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A chain under Alpa's objective.

    Attributes:
        total_s: seconds of a batch.
        bottleneck_s: seconds per example of the slowest stage.
        layout: the stages.
    """

    total_s: float
    bottleneck_s: float
    layout: Layout


def least_total(search: ChainSearch, *, intra_operator: bool = False) -> Total | None:
    """The chain with the least step time under Alpa's objective. Exact up to `MOST_LAYERS` operators.

    Tries every bottleneck in ascending order until M times it alone exceeds the best total.

    Args:
        search: the costs of all runs of operators.
        intra_operator: stages divide their operators in the fastest way; False: all by batch.
    """
    layers = _Layers(search, intra_operator=intra_operator)
    count = search.microbatches
    micro_examples = search.model.batch_examples / count
    best: Total | None = None
    for target in layers.targets():
        if best is not None and count * target * micro_examples >= best.total_s:
            break
        found = layers.least_sum(target)
        if found is not None:
            sum_s, longest_s, layout = found
            total_s = (sum_s + (count - 1) * longest_s) * micro_examples
            if best is None or total_s < best.total_s:
                best = Total(total_s=total_s, bottleneck_s=longest_s, layout=layout)
    return best


class _Layers:
    """The operators of a chain in layers: runs of about the same time.

    Args:
        search: the costs of all runs of operators.
        intra_operator: see `least_total`.
    """

    def __init__(self, search: ChainSearch, *, intra_operator: bool) -> None:
        self.search = search
        self.borders = _borders(search)
        starts, ends = self.borders[:-1], self.borders
        self.splits = SplitSearch(search, self.borders) if intra_operator else None
        #: [stages after it, replica choices, first layer, layer after the last]; infinite: does not fit.
        self.times = (
            np.where(search.fits, search.times, np.inf)[:, :, starts][:, :, :, ends]
            if self.splits is None
            else self.splits.times
        )

    def targets(self) -> Iterator[float]:
        """Longest stage times in ascending order; of many layers only some, from the least that is possible."""
        times = np.unique(self.times[np.isfinite(self.times)])
        if len(self.borders) == len(self.search.order) + 1:
            yield from times.tolist()
            return
        low, high = 0, times.size
        while low < high:  # the first time with which there is a chain
            middle = (low + high) // 2
            low, high = (low, middle) if self.least_sum(float(times[middle])) is not None else (middle + 1, high)
        if low == times.size:
            return
        # A step takes at least M times its longest stage, and with this one at most M + stages times.
        count = self.search.microbatches
        limit = times[low] * (count + self.search.max_stages) / count
        left = times[low:][times[low:] <= limit]
        yield from left[:: max(1, left.size // _MOST_TARGETS)].tolist()

    def least_sum(self, target: float) -> tuple[float, float, Layout] | None:
        """Least sum of stage times with every stage at most `target`: a program over (stages, devices, start).

        Returns:
            The sum and the longest in seconds per example, and the stages; None: there are none.
        """
        size, most = len(self.borders) - 1, self.search.model.cluster.devices
        allowed = np.where(self.times <= target, self.times, np.inf)
        none = np.full((most + 1, size + 1), np.inf)
        none[:, size] = 0
        tables, choices = [none], []
        for place in range(min(size, most)):
            new, choice = tables[-1].copy(), np.full((most + 1, size + 1, 2), -1)
            times = allowed[min(place, len(allowed) - 1)]
            for number, replicas in enumerate(self.search.replicas.tolist()):
                through = times[number] + tables[-1][: most + 1 - replicas, None, :]  # [devices left, start, end]
                cut = through.argmin(axis=2)
                value = np.take_along_axis(through, cut[:, :, None], axis=2)[:, :, 0]
                devices, start = np.nonzero(value < new[replicas:, :size])
                new[devices + replicas, start] = value[devices, start]
                choice[devices + replicas, start, 0] = cut[devices, start]
                choice[devices + replicas, start, 1] = number
            tables.append(new)
            choices.append(choice)
            if len(allowed) == 1 and np.array_equal(tables[-1], tables[-2]):
                break  # more stages change nothing
        if not np.isfinite(tables[-1][most, 0]):
            return None
        stages: list[Placed] = []
        longest_s, layer, left = 0.0, 0, most
        for place, choice in reversed(list(enumerate(choices))):
            end, number = choice[left, layer].tolist()
            if end >= 0:
                position = min(place, len(allowed) - 1)
                stages.append(self._placed(position, number, layer, end))
                longest_s = max(longest_s, float(allowed[position, number, layer, end]))
                layer, left = end, left - stages[-1].replicas
        return float(tables[-1][most, 0]), longest_s, tuple(stages)

    def _placed(self, position: int, number: int, layer: int, end: int) -> Placed:
        """The stage of some layers, with `position` stages after it."""
        if self.splits is not None:
            return self.splits.placed(position, number, layer, end)
        replicas = int(self.search.replicas[number])
        return self.search.placed(self.borders[layer], self.borders[end], replicas)


def _borders(search: ChainSearch) -> list[int]:
    """Operators at which layers begin, and the number of operators."""
    size = len(search.order)
    if size <= MOST_LAYERS:
        return list(range(size + 1))
    until = search.sums["per_example_s"][0]  # of the operators before each one
    wanted = np.linspace(0, float(until[-1]), MOST_LAYERS + 1)[1:-1]
    return sorted({0, size, *np.searchsorted(until, wanted).tolist()} - {size + 1})
