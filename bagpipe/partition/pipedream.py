"""PipeDream's program on a hierarchy: a chain inside a host, replicated over hosts; and chains on uneven devices.

    hosts of g devices      run of operators ──(m hosts)──> a chain of stages in each of them, every stage m times
                            runs one after the other ──> all hosts                  `HierarchicalSearch`
    uneven hosts, speeds    stage ──> a range of ranks, with their speeds and links   `RangeSearch`

Both answer "can every stage stay within this time?" (Narayanan et al., SOSP 2019, section 3.1, where the answer is the
least such time). Where every device has a host of its own the hierarchy has one level, and the search is `ChainSearch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bagpipe.partition.bisect import Layout, probes
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.planner import Found, Problem

__all__ = ["HierarchicalSearch", "RangeSearch", "pipedream"]


def pipedream(problem: Problem) -> Found | None:
    """The chain with the least bottleneck, per number of micro-batches."""
    model = problem.model
    layouts = [layout for count in problem.microbatches for layout in _chains(problem, count)]
    if not layouts:
        return None

    def bottleneck(layout: Layout) -> float:
        search = ChainSearch(model, sorted({stage.replicas for stage in layout}), layout[0].microbatches)
        return search.bottleneck(layout)

    least = {layout: bottleneck(layout) for layout in dict.fromkeys(layouts)}
    best = min(least, key=lambda layout: (least[layout], len(layout)))
    return Found(best=best, bottleneck_s=least[best], layouts=tuple(least), relay=True)


def _chains(problem: Problem, count: int) -> Iterator[Layout]:
    """The best chain of every search that suits the cluster."""
    model = problem.model
    cluster = model.cluster
    if cluster.is_uniform:
        chain = ChainSearch(model, problem.replicas, count)
        yield from list(probes(chain.bottleneck, chain.solve))[-1:]
        if 1 < cluster.host_sizes[0] < cluster.devices:
            yield from HierarchicalSearch(chain).layouts()
    else:
        ranges = RangeSearch(model, problem.replicas, count)
        yield from list(probes(ranges.bottleneck, ranges.solve))[-1:]


class HierarchicalSearch:
    """Chains of two levels on hosts of one size.

    Args:
        chain: the costs of runs; its replicas are those allowed in all.
    """

    def __init__(self, chain: ChainSearch) -> None:
        self.chain = chain
        self.model = chain.model
        cluster = self.model.cluster
        self.per_host = cluster.host_sizes[0]
        self.hosts = len(cluster.host_sizes)
        #: Most stages with as many in flight: positions of the chain's table of what fits.
        self.positions = len(chain.fits)

    def layouts(self) -> Iterator[Layout]:
        """The best layout for each bound on the number of stages, as far as their memory suffices."""
        for position in range(self.positions):
            found = list(probes(self.chain.bottleneck, partial(self.solve, position=position)))
            yield from (layout for layout in found[-1:] if self._fits(layout))

    def _fits(self, layout: Layout) -> bool:
        in_flight = self.model.in_flight(layout)
        return all(
            self.model.fits(self.model.totals(stage.mask), stage.replicas, examples)
            for stage, examples in zip(layout, in_flight, strict=True)
        )

    def solve(self, target: float, position: int = 0) -> Layout | None:
        """A layout whose stages all meet `target` seconds per example, or None.

        Args:
            target: seconds per example.
            position: every stage must fit with as many stages after it. The layout may have more, so check it.
        """
        size = len(self.chain.order)
        inside = {hosts: self._devices_inside(target, hosts, position) for hosts in range(1, self.hosts + 1)}
        fewest = np.full((size, size + 1), self.hosts + 1)  # hosts of each run
        for hosts in range(self.hosts, 0, -1):
            fewest[inside[hosts][0] <= self.per_host] = hosts
        used = np.full(size + 1, self.hosts + 1)
        used[size] = 0
        ends = np.zeros(size, np.int64)
        for start in range(size - 1, -1, -1):
            through = fewest[start] + used
            ends[start] = through.argmin()
            used[start] = through[ends[start]]
        if used[0] > self.hosts:
            return None
        stages: list[Placed] = []
        start = 0
        while start < size:
            end = int(ends[start])
            hosts = int(fewest[start, end])
            stages += self._stages(inside[hosts], start, end, hosts)
            start = end
        return tuple(stages)

    def _devices_inside(
        self, target: float, hosts: int, position: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Runs as chains inside each of `hosts` hosts: fewest devices [start, end], first cut, devices of one stage."""
        chain, size = self.chain, len(self.chain.order)
        too_many = self.per_host + 1
        whole = np.full((size, size + 1), too_many)  # as one stage
        for number, replicas in reversed(list(enumerate(chain.replicas.tolist()))):
            if replicas % hosts == 0 and replicas // hosts <= self.per_host:
                whole[(chain.times[number] <= target) & chain.fits[position, number]] = replicas // hosts
        devices, cuts = whole.copy(), np.full((size, size + 1), -1)
        for start in range(size - 2, -1, -1):
            # The first stage ends at `cut`; the rest, from `cut` to `end`, is placed already.
            through = whole[start, 1:size, None] + devices[1:size]
            best = through.argmin(axis=0)
            value = np.minimum(through[best, np.arange(size + 1)], too_many)
            better = value < devices[start]
            devices[start, better] = value[better]
            cuts[start, better] = best[better] + 1
        return devices, cuts, whole

    def _stages(
        self,
        inside: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        start: int,
        end: int,
        hosts: int,
    ) -> Iterator[Placed]:
        _, cuts, whole = inside
        while start < end:
            cut = int(cuts[start, end]) if cuts[start, end] >= 0 else end
            yield self.chain.placed(start, cut, int(whole[start, cut]) * hosts)
            start = cut


class RangeSearch:
    """Chains whose stages get ranges of ranks: of any speeds, on hosts of any sizes.

    A stage of ranks p to q - 1 has ``devices - p`` devices from it to the end, and keeps as many micro-batches per
    replica: ``ceil((devices - p) / (q - p))``, PipeDream's rule for the number in flight.

    Args:
        model: the cost model.
        replicas: allowed replica counts of a stage.
        microbatches: micro-batches per batch of every stage.
    """

    def __init__(self, model: CostModel, replicas: tuple[int, ...], microbatches: int) -> None:
        self.model = model
        self.microbatches = microbatches
        self.chain = ChainSearch(model, replicas, microbatches)
        self.size, self.devices = len(self.chain.order), model.cluster.devices
        counts = sorted({count for count in replicas if count <= self.devices})
        ranges = [range(first, first + n) for first in range(self.devices) for n in counts if first + n <= self.devices]
        #: (first rank, rank after the last) -> its number; only ranges of allowed sizes have a table.
        self.number_of = {(ranks.start, ranks.stop): number for number, ranks in enumerate(ranges)}
        self.times = np.empty((len(ranges), self.size, self.size + 1))
        for number, ranks in enumerate(ranges):
            self.times[number] = self._range_times(ranks)

    def _range_times(self, ranks: range) -> NDArray[np.float64]:
        """[start, end]: seconds per example of runs on these ranks; infinite where they do not fit."""
        model, sums, count = self.model, self.chain.sums, self.microbatches
        cluster, batch, replicas = model.cluster, model.batch_examples, len(ranks)
        per_byte_s, fixed_s = cluster.network.ring(ranks)
        compute = sums["fixed_s"] * count / batch + sums["per_example_s"] / replicas
        transfer = sums["transfer_bytes"] / (model.rank_bandwidth_bytes_per_s * replicas)
        sync = sums["param_bytes"] * per_byte_s + fixed_s
        times: NDArray[np.float64] = np.maximum(compute / cluster.speed(ranks), transfer) + sync / batch
        in_flight = min(count, -((self.devices - ranks[0]) // -replicas))
        examples = -(in_flight * batch // -count)
        activations = examples / replicas * sums["kept_bytes"]
        fits = cluster.weight_copies * sums["param_bytes"] + activations <= cluster.memory_bytes
        times[~fits | ~np.triu(np.ones(times.shape, np.bool_), 1)] = np.inf
        return times

    def solve(self, target: float) -> Layout | None:
        """A layout whose stages all meet `target` seconds per example on ranks 0, 1, …, or None.

        Of several, the one with the fewest ranks.
        """
        good = (self.times <= target) & np.isfinite(self.times)  # [ranges, starts, ends]
        firsts, lasts = np.array(list(self.number_of), dtype=np.int64).reshape(-1, 2).T
        # is_placed[n, q]: the first n operators can be placed on the first q ranks, all of them used
        is_placed = np.zeros((self.size + 1, self.devices + 1), np.bool_)
        is_placed[0, 0] = True
        before: dict[tuple[int, int], tuple[int, int]] = {}
        for end in range(1, self.size + 1):
            ways = good[:, :end, end].T & is_placed[:end, firsts]  # [starts, ranges]
            possible = ways.any(axis=0)
            for last in sorted(set(lasts[possible].tolist())):
                own = np.flatnonzero(possible & (lasts == last))
                start, place = divmod(int(ways[:, own].argmax()), own.size)
                is_placed[end, last] = True
                before[end, last] = start, int(firsts[own[place]])
        complete = np.flatnonzero(is_placed[self.size])
        if not complete.size:
            return None
        stages: list[Placed] = []
        end, last = self.size, int(complete[0])
        while end:
            start, first = before[end, last]
            stages.insert(0, self.chain.placed(start, end, last - first))
            end, last = start, first
        return tuple(stages)

    def bottleneck(self, layout: Layout) -> float:
        """Seconds per example of the slowest stage, on ranks 0, 1, …."""
        start = first = 0
        slowest = 0.0
        for stage in layout:
            end, last = start + stage.mask.bit_count(), first + stage.replicas
            slowest = max(slowest, float(self.times[self.number_of[first, last], start, end]))
            start, first = end, last
        return slowest
