"""`least_time`: Piper's program over downsets with its own cost model, vectorised over the downsets of each downset.

    least[I, k, s] = min over J ⊂ I, degrees t and d of max(least[J, k - t d, s - d], time of the stage I \\ J)
    time           = sum of layers / d + (2 (edges cut + their syncs) / d + 4 (d - 1) / d parameters / N) / bandwidth
    memory         = sum of fixed + ceil(s / d) in flight                     N micro-batches a batch, d divides N

I contains the consumers of its layers. k devices hold it, in stages whose data-parallel degrees d sum to s; t is the
degree of tensor parallelism (Tarnawski et al., NeurIPS 2021, sections 3 and 4). A stage that does not fit exchanges the
fastest ways of its layers for smaller ones, those with the least time per byte first, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.partition.cuts import closed_sets
from bagpipe.partition.operators import Cost, Operator, OperatorGraph, members
from benchmarks.piper.inputs import PiperInput

__all__ = ["MOST_DOWNSETS", "Optimum", "least_time"]

MOST_DOWNSETS = 40_000

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best partition.

    Attributes:
        time_s: seconds per micro-batch of its slowest stage; infinite: nothing fits.
        downsets: of the graph.
    """

    time_s: float
    downsets: int


class _Degree:
    """The layers on one degree of tensor parallelism, as arrays over nodes; the first of two ways is the faster."""

    def __init__(self, model: PiperInput, degree: int) -> None:
        layers = [layers.get(degree) for layers in model.layers]
        self.missing = np.array([layer is None for layer in layers], dtype=np.float64)
        ways = [sorted(layer.ways if layer else (), key=lambda way: way.time_s) for layer in layers]
        if any(len(each) > 2 for each in ways):
            raise InputError("expected at most two ways for each degree, got more")

        def column(name: str, place: int) -> _Floats:
            return np.array([getattr(each[min(place, len(each) - 1)], name) if each else 0.0 for each in ways])

        self.time_s, self.small_time_s = column("time_s", 0), column("time_s", 1)
        self.in_flight, self.small_in_flight = column("in_flight_bytes", 0), column("in_flight_bytes", 1)
        self.fixed, self.small_fixed = column("fixed_bytes", 0), column("fixed_bytes", 1)
        self.param_bytes = np.array([layer.param_bytes if layer else 0.0 for layer in layers])
        size = len(layers)
        #: [consumer, producer] and [producer, consumer]: what the first pays if the edge is cut.
        self.entering, self.leaving = np.zeros((size, size)), np.zeros((size, size))
        for (producer, consumer), num_bytes in model.edges.items():
            takes, gives = layers[consumer], layers[producer]
            if takes is not None:
                self.entering[consumer, producer] = 2 * (num_bytes + takes.in_sync_bytes[producer])
            if gives is not None:
                self.leaving[producer, consumer] = 2 * (num_bytes + gives.out_sync_bytes[consumer])


def least_time(model: PiperInput) -> Optimum:
    """The least time of all partitions.

    Raises:
        InputError: the graph has too many downsets or a cycle, or a layer has more than two ways for a degree.
    """
    names = [str(number) for number in range(len(model.layers))]
    graph = OperatorGraph(
        operators=tuple(Operator(name=name, forward=Cost(), backward=Cost()) for name in names),
        edges=tuple((names[one], names[other]) for one, other in model.edges),
    )
    sets = closed_sets(graph, MOST_DOWNSETS)
    if sets is None:
        raise InputError(f"expected at most {MOST_DOWNSETS} downsets, got more")
    return Optimum(time_s=_Search(model, sets).solve(), downsets=len(sets))


class _Search:
    def __init__(self, model: PiperInput, sets: tuple[int, ...]) -> None:
        self.model = model
        size = len(model.layers)
        #: [downsets, nodes]: whether the node is in the downset.
        self.inside = np.zeros((len(sets), size))
        for place, mask in enumerate(sets):
            self.inside[place, members(mask)] = 1
        words = -(-size // 64)
        self.words = np.array(
            [[mask >> 64 * word & (1 << 64) - 1 for word in range(words)] for mask in sets], np.uint64
        )
        self.most_sum = min(model.microbatches, model.devices)
        degrees = sorted({degree for layers in model.layers for degree in layers if degree <= model.devices})
        self.degrees = {degree: _Degree(model, degree) for degree in degrees}
        #: Without tensor parallelism the devices are the sum of the data-parallel degrees: one place suffices.
        self.places = model.devices + 1 if degrees != [1] else 1
        #: Per degree: [downsets], bytes of the edges inside as their producers pay them.
        self.inner = {
            degree: np.einsum("ij,ij->i", self.inside @ each.leaving, self.inside)
            for degree, each in self.degrees.items()
        }

    def solve(self) -> float:
        least = np.full((len(self.inside), self.places, self.most_sum + 1), np.inf)
        least[0] = 0
        for place in range(1, len(self.inside)):
            smaller = np.flatnonzero(~(self.words[:place] & ~self.words[place]).any(axis=1))
            for degree in self.degrees:
                self._extend(least, place, smaller, degree)
            least[place] = np.minimum.accumulate(np.minimum.accumulate(least[place], axis=0), axis=1)
        return float(least[-1, -1, -1])

    def _extend(self, least: _Floats, place: int, smaller: NDArray[np.int64], degree: int) -> None:
        """Put a stage of this degree in front of each of the smaller downsets."""
        model, layers = self.model, self.degrees[degree]
        smaller = smaller[(self.inside[place] - self.inside[smaller]) @ layers.missing == 0]
        if not smaller.size:
            return
        stage = self.inside[place] - self.inside[smaller]
        outside = layers.entering @ (1 - self.inside[place])
        cut_bytes = stage @ outside
        cut_bytes += self.inside[smaller] @ (self.inside[place] @ layers.leaving) - self.inner[degree][smaller]
        compute_s = self._compute(layers, stage)
        param_bytes = stage @ layers.param_bytes
        for replicas in range(1, min(self.most_sum, model.devices // degree) + 1):
            if model.microbatches % replicas:
                continue
            sync_bytes = 4 * (replicas - 1) / replicas * param_bytes / model.microbatches
            link_s = (cut_bytes / replicas + sync_bytes) / model.bytes_per_s
            sums = np.arange(replicas, self.most_sum + 1)
            times = compute_s[:, -(sums // -replicas) - 1] / replicas + link_s[:, None]  # [smaller, sums]
            used = degree * replicas if self.places > 1 else 0
            rest = least[smaller, : self.places - used, : self.most_sum + 1 - replicas]
            best = np.maximum(rest, times[:, None, :]).min(axis=0)
            into = least[place, used:, replicas:]
            np.minimum(into, best, out=into)

    def _compute(self, layers: _Degree, stage: _Floats) -> _Floats:
        """[stages, micro-batches in flight - 1]: seconds of a stage's layers; infinite: they do not fit."""
        fastest_s = stage @ layers.time_s
        in_flight, fixed = stage @ layers.in_flight, stage @ layers.fixed
        seconds = np.full((len(stage), self.most_sum), np.inf)
        for number in range(1, self.most_sum + 1):
            missing = in_flight * number + fixed - self.model.memory_bytes
            seconds[missing <= 0, number - 1] = fastest_s[missing <= 0]
            saved = (layers.in_flight - layers.small_in_flight) * number + layers.fixed - layers.small_fixed
            nodes = np.flatnonzero(saved > 1e-9)
            more_s = layers.small_time_s - layers.time_s
            nodes = nodes[np.argsort(more_s[nodes] / saved[nodes], kind="stable")]
            rows = np.flatnonzero((missing > 0) & (missing - stage @ np.maximum(saved, 0) <= 0))
            if not rows.size:
                if not (missing <= 0).any():
                    break  # more in flight do not fit either
                continue
            chosen = stage[rows][:, nodes]
            enough = np.cumsum(chosen * saved[nodes], axis=1) >= missing[rows, None] - 1e-9
            # Of the first that suffice: all before it, and itself.
            until = np.where(enough.any(axis=1), enough.argmax(axis=1), len(nodes) - 1)
            spent_s = np.cumsum(chosen * more_s[nodes], axis=1)[np.arange(len(rows)), until]
            seconds[rows, number - 1] = fastest_s[rows] + spent_s
        return seconds
