"""The exact search: dynamic programming over all sets of operators that contain their consumers.

    nothing ──stage──> closed set ──stage──> … ──> everything        each step adds a stage before the placed ones

Every partition whose stages can be ordered is such a walk, so the best walk is the best partition. What a stage has in
flight depends on the stages it feeds. A state therefore keeps the depth of every placed operator with an unplaced
producer, and a state is dropped only if another one needs no more devices and is nowhere deeper. The number of closed
sets grows with the product of the branches' lengths, so `closed_sets` has a limit. (Piper, NeurIPS 2021, walks the same
sets and estimates the memory from the order of the walk.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel, Placed, in_flight_units
from bagpipe.partition.operators import OperatorGraph, members

__all__ = ["MOST_SETS", "CutSearch", "closed_sets"]

#: Limit of closed sets for exact searches, which take the square of their number: 8 operators have at most 256.
MOST_SETS = 300


def closed_sets(graph: OperatorGraph, limit: int) -> tuple[int, ...] | None:
    """All sets that contain the consumers of their operators, by size; None if there are more than `limit`."""
    found = {0}
    newest = [0]
    while newest:
        larger = set()
        for mask in newest:
            for operator in range(graph.size):
                if not mask >> operator & 1 and not graph.consumers[operator] & ~mask:
                    larger.add(mask | 1 << operator)
            if len(found) + len(larger) > limit:
                return None
        found |= larger
        newest = list(larger)
    return tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask)))


@dataclass(frozen=True, slots=True)
class _State:
    """The placed stages, as a linked list of states.

    Attributes:
        devices: number of used devices.
        deepest: units in flight of the deepest stage.
        depths: (units in flight, micro-batches) of the stage of each frontier operator, by operator number.
        before, stage: the previous state, and the stage added to it.
    """

    devices: int
    deepest: int
    depths: tuple[tuple[int, int], ...]
    before: _State | None = None
    stage: Placed | None = None

    def is_as_shallow(self, other: _State) -> bool:
        return all(a[1] == b[1] and a[0] <= b[0] for a, b in zip(self.depths, other.depths, strict=True))


class CutSearch:
    """Feasibility by dynamic programming over closed sets.

    Args:
        model: the cost model.
        replicas: allowed replica counts of a stage.
        microbatches: allowed micro-batch counts of a stage.
        sets: from `closed_sets`.
    """

    def __init__(
        self, model: CostModel, replicas: Sequence[int], microbatches: Sequence[int], sets: Sequence[int]
    ) -> None:
        self.model = model
        self.replicas = sorted(replicas)
        self.microbatches = microbatches
        self.whole = math.lcm(*microbatches)
        self.sets = sets
        graph = model.graph
        #: closed set -> its operators with a producer outside
        self.frontier = {s: [n for n in members(s) if graph.producers[n] & ~s] for s in sets}
        #: closed set -> larger sets: the possible next stages
        self.larger = {s: [t for t in sets[i + 1 :] if not s & ~t] for i, s in enumerate(sets)}

    def solve(self, target: float) -> Layout | None:
        """A layout whose stages all meet `target` seconds per example, with the fewest devices, or None."""
        everything = self.sets[-1]
        states: dict[int, list[_State]] = {mask: [] for mask in self.sets}
        states[0].append(_State(0, 0, ()))
        stages: dict[tuple[int, int], int | None] = {}
        for placed in self.sets:
            for larger in self.larger[placed] if states[placed] else ():
                mask = larger & ~placed
                for count in self.microbatches:
                    if (mask, count) not in stages:
                        # 0 in flight: replicas that the time alone needs; memory is checked per state.
                        stages[mask, count] = self.model.least_replicas(mask, count, 0, target, self.replicas)
                    if stages[mask, count] is not None:
                        self._extend(states[placed], states[larger], placed, larger, count, target)
        done = states[everything]
        return _layout(done[0]) if done else None

    def _extend(
        self, states: list[_State], into: list[_State], placed: int, larger: int, count: int, target: float
    ) -> None:
        model, mask = self.model, larger & ~placed
        fed = 0
        for operator in members(mask):
            fed |= model.graph.consumers[operator]
        for state in states:
            depth_of = dict(zip(self.frontier[placed], state.depths, strict=True))
            below = [depth for operator, depth in depth_of.items() if fed >> operator & 1]
            units = in_flight_units(count, below, self.whole)
            examples = -(units * model.batch_examples // -self.whole)
            replicas = model.least_replicas(mask, count, examples, target, self.replicas)
            if replicas is None or state.devices + replicas > model.cluster.devices:
                continue
            depths = tuple(depth_of.get(n, (units, count)) for n in self.frontier[larger])
            new = _State(
                state.devices + replicas, max(state.deepest, units), depths, state, Placed(mask, replicas, count)
            )
            beats = self._is_shallower if larger == self.sets[-1] else self._beats
            if not any(beats(old, new) for old in into):
                into[:] = [old for old in into if not beats(new, old)] + [new]

    def _beats(self, state: _State, other: _State) -> bool:
        """Whether `state` can be completed in every way that `other` can; of equal states, whether it is shallower."""
        if self.model.cluster.memory_bytes == math.inf:
            return (state.devices, state.deepest) <= (other.devices, other.deepest)
        return state.devices <= other.devices and state.is_as_shallow(other)

    @staticmethod
    def _is_shallower(state: _State, other: _State) -> bool:
        """Whether a complete state is better."""
        return (state.deepest, state.devices) <= (other.deepest, other.devices)


def _layout(state: _State) -> Layout:
    stages = []
    walk: _State | None = state
    while walk is not None and walk.stage is not None:
        stages.append(walk.stage)
        walk = walk.before
    return tuple(stages)
