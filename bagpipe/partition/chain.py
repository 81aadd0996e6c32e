"""Dynamic programming over runs of a topological order: chain partitions with the least bottleneck (PipeDream).

    order ──cut into runs──> stage 0 -> stage 1 -> …        stages relay what later stages need

Stage number s from the end has s micro-batches in flight. With ``relay=False`` the runs are stages of a graph, and
tensors go directly to their consumers. Tables cover all runs (start, end).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel, Placed, Totals
from bagpipe.partition.operators import members

__all__ = ["ChainSearch", "live_bytes"]

_Table = NDArray[np.float64]


def live_bytes(model: CostModel, order: Sequence[int]) -> list[float]:
    """Bytes per example across each boundary of a chain: tensors made before it and needed after it.

    Boundary n lies before the n-th operator of `order`; there are ``len(order) + 1``.
    """
    graph = model.graph
    crossing, before = [0.0], 0
    for operator in order:
        before |= 1 << operator
        alive = (n for n in members(before) if graph.consumers[n] & ~before)
        crossing.append(math.fsum(graph.operators[n].output_bytes for n in alive))
    return crossing


class ChainSearch:
    """The costs of all runs of a topological order.

    Args:
        model: the cost model.
        replicas: allowed replica counts of a stage.
        microbatches: micro-batches per batch of every stage.
        relay: a stage also transfers what later stages need.
        order: topological; default: the graph's.
    """

    def __init__(
        self,
        model: CostModel,
        replicas: Sequence[int],
        microbatches: int,
        *,
        relay: bool = True,
        order: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.replicas = np.array(sorted(r for r in replicas if r <= model.cluster.devices), dtype=np.int64)
        self.microbatches = microbatches
        self.order = tuple(model.graph.order if order is None else order)
        self.sums = self._sums(relay)
        self.times = self._times()
        self.max_stages = min(len(self.order), model.cluster.devices)
        # With unbounded memory a stage's position does not matter: one table suffices.
        positions = self.max_stages if model.cluster.memory_bytes < math.inf else 1
        self.fits = np.stack([self._fits(position) for position in range(positions)])

    def _sums(self, relay: bool) -> dict[str, _Table]:
        """Per field of `Totals`: [starts, ends], 0 where the end precedes the start."""
        size = len(self.order)
        sums = {name: np.zeros((size, size + 1)) for name in Totals.__slots__}
        live = live_bytes(self.model, self.order)
        for start in range(size):
            mask = 0
            for end in range(start + 1, size + 1):
                mask |= 1 << self.order[end - 1]
                totals = self.model.totals(mask)
                for name, table in sums.items():
                    table[start, end] = getattr(totals, name)
                if relay:
                    sums["transfer_bytes"][start, end] = live[start] + live[end]
        return sums

    def _times(self) -> _Table:
        """[replica choices, starts, ends]: `CostModel.time_per_example` of all runs; inf: no run."""
        model, sums = self.model, self.sums
        batch = model.batch_examples
        d = self.replicas[:, None, None]
        rings = np.array([model.ring(int(replicas)) for replicas in self.replicas]).reshape(-1, 2)[:, :, None, None]
        compute = (sums["fixed_s"] * self.microbatches / batch + sums["per_example_s"] / d) / model.speed
        transfer = sums["transfer_bytes"] / (model.rank_bandwidth_bytes_per_s * d)
        sync = rings[:, 0] * sums["param_bytes"] + rings[:, 1]
        times: _Table = np.maximum(compute, transfer) + sync / batch
        times[:, ~np.triu(np.ones(times.shape[1:], dtype=np.bool_), 1)] = np.inf
        return times

    def _fits(self, position: int) -> NDArray[np.bool_]:
        """[replica choices, starts, ends]: whether the run fits the memory with `position` stages after it."""
        count, batch = self.microbatches, self.model.batch_examples
        examples = -(min(position + 1, count) * batch // -count)
        cluster, sums = self.model.cluster, self.sums
        activations = examples / self.replicas[:, None, None] * sums["kept_bytes"]
        fits: NDArray[np.bool_] = cluster.weight_copies * sums["param_bytes"] + activations <= cluster.memory_bytes
        return fits

    def solve(self, target: float) -> Layout | None:
        """The layout with the fewest stages that all meet `target` seconds per example, or None."""
        if not self.replicas.size:
            return None
        devices_of = self._devices(target)
        size = len(self.order)
        # tables[s][n]: fewest devices for the operators from n on in at most s stages; cuts: where its first run ends
        used = np.full(size + 1, np.inf)
        used[size] = 0
        tables, cuts = [used], []
        for position in range(self.max_stages):
            through = devices_of[min(position, len(devices_of) - 1)] + tables[-1][None, :]
            cut = through.argmin(axis=1)
            best = np.append(through[np.arange(size), cut], 0)
            keep = tables[-1] <= best  # fewer stages do as well
            tables.append(np.where(keep, tables[-1], best))
            cuts.append(np.where(keep, -1, np.append(cut, -1)))
            if tables[-1][0] <= self.model.cluster.devices:
                return self._layout(cuts, devices_of)
        return None

    def _devices(self, target: float) -> _Table:
        """[positions, starts, ends]: fewest replicas with which a run meets the target and fits; inf: none."""
        good = (np.isfinite(self.times) & (self.times <= target))[None] & self.fits
        first = good.argmax(axis=1)
        return np.where(good.any(axis=1), self.replicas[first], np.inf)

    def _layout(self, cuts: Sequence[NDArray[np.int64]], devices_of: _Table) -> Layout:
        stages, start = [], 0
        for position in reversed(range(len(cuts))):
            end = int(cuts[position][start])
            if end >= 0:
                devices = int(devices_of[min(position, len(devices_of) - 1)][start, end])
                stages.append(self.placed(start, end, devices))
                start = end
        return tuple(stages)

    def placed(self, start: int, end: int, replicas: int) -> Placed:
        mask = 0
        for operator in self.order[start:end]:
            mask |= 1 << operator
        return Placed(mask, replicas, self.microbatches)

    def bottleneck(self, layout: Layout) -> float:
        """Seconds per example of the slowest stage of a layout of runs, relays included."""
        ends = np.cumsum([stage.mask.bit_count() for stage in layout]).tolist()
        choice = {int(replicas): number for number, replicas in enumerate(self.replicas)}
        runs = zip([0, *ends[:-1]], ends, layout, strict=True)
        return max(float(self.times[choice[stage.replicas], start, end]) for start, end, stage in runs)
