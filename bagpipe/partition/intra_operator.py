"""`SplitSearch`: the fastest splits of the operators of every stage of a chain, Alpa's second level.

    run of operators, n devices ──program over the operators──> a split for each one ──> seconds per example, memory

    least[live layouts] after an operator = min over its splits of  least before + its work + changes of its inputs

The state is the layout of every tensor that a later operator takes. The ways to a state that are kept are those that no
other one beats in both time and memory. Alpa solves an integer program over many more layouts (Zheng et al., OSDI 2022,
section 4); here they are `splits.SPLITS`, and the program is exact while few tensors are live.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Placed
from bagpipe.partition.operators import members
from bagpipe.partition.splits import SPLITS, SplitModel, Work, is_batch, split_names

__all__ = ["MOST_STATES", "MOST_WAYS", "SplitSearch", "fastest_splits"]

#: Most states that are kept: exact with up to two live tensors, of three layouts each.
MOST_STATES = 9

#: Most ways to a state that are kept, where memory is limited: the fastest, the smallest and those between.
MOST_WAYS = 8


#: Splits of a run, and its work with them.
_Run = tuple[tuple[str, ...], Work]


@dataclass(frozen=True, slots=True)
class _Way:
    """Splits of the first operators of a run, as a linked list: seconds per example and bytes so far."""

    time_s: float
    memory_bytes: float
    split: str = ""
    before: _Way | None = None

    def splits(self) -> tuple[str, ...]:
        found, way = [], self
        while way.before is not None:
            found.append(way.split)
            way = way.before
        return tuple(reversed(found))


class _Program:
    """The program over the operators of a chain on some devices.

    Args:
        costs: of the operators.
        order: of the chain.
        in_flight_examples: of the stage; None: memory does not matter.
    """

    def __init__(self, costs: SplitModel, order: Sequence[int], in_flight_examples: float | None) -> None:
        self.costs = costs
        self.order = order
        self.graph = costs.model.graph
        self.examples = in_flight_examples
        self.limit = math.inf if in_flight_examples is None else costs.model.cluster.memory_bytes
        self._operators: dict[tuple[int, str], tuple[float, float]] = {}
        self._changes: dict[tuple[int, str, str], tuple[float, float]] = {}

    def runs(self, start: int, ends: Sequence[int]) -> Iterator[tuple[int, _Way]]:
        """(end, the fastest way) of the runs from one operator to each of the ascending `ends`, if there is one."""
        states: dict[tuple[str, ...], list[_Way]] = {(): [_Way(0.0, 0.0)]}
        live: list[int] = []
        done = 0
        for position in range(start, ends[-1]):
            number = self.order[position]
            done |= 1 << number
            after = [n for n in (*live, number) if self.graph.consumers[n] & ~done]
            states = self._pruned(self._extended(states, live, after, number))
            live = after
            if position + 1 in ends:
                closed = (way for layouts, ways in states.items() for way in self._closed(ways, live, layouts))
                best = min(closed, key=lambda way: way.time_s, default=None)
                if best is not None:
                    yield position + 1, best

    def _extended(
        self, states: Mapping[tuple[str, ...], list[_Way]], live: list[int], after: list[int], number: int
    ) -> dict[tuple[str, ...], list[_Way]]:
        """The states with one more operator, split in every way."""
        producers = members(self.graph.producers[number])
        place = {n: position for position, n in enumerate(live)}
        kept = [place.get(n) for n in after]
        found: dict[tuple[str, ...], list[_Way]] = {}
        for layouts, ways in states.items():
            befores = [(n, layouts[place[n]] if n in place else "batch") for n in producers]
            for name in split_names(self.graph.operators[number], self.costs.replicas):
                split = SPLITS[name]
                time_s, memory_bytes = self._operator(number, name)
                for producer, before in befores:
                    more_s, more_bytes = self._change(producer, before, split.takes)
                    time_s, memory_bytes = time_s + more_s, memory_bytes + more_bytes
                state = tuple(split.gives if position is None else layouts[position] for position in kept)
                found.setdefault(state, []).extend(
                    _Way(way.time_s + time_s, way.memory_bytes + memory_bytes, name, way)
                    for way in ways
                    if way.memory_bytes + memory_bytes <= self.limit
                )
        return found

    def _pruned(self, states: Mapping[tuple[str, ...], list[_Way]]) -> dict[tuple[str, ...], list[_Way]]:
        """The fastest states, and the one in which all tensors are divided by examples."""
        best = {layouts: _undominated(ways) for layouts, ways in states.items() if ways}
        kept = sorted(best, key=lambda layouts: best[layouts][0].time_s)[:MOST_STATES]
        by_batch = next((layouts for layouts in best if set(layouts) <= {"batch"}), kept[0] if kept else ())
        return {layouts: best[layouts] for layouts in dict.fromkeys([*kept, by_batch]) if kept}

    def _closed(self, ways: list[_Way], live: list[int], layouts: tuple[str, ...]) -> Iterator[_Way]:
        """Ways to a state whose live tensors leave the stage, that fit."""
        time_s = memory_bytes = 0.0
        for number, layout in zip(live, layouts, strict=True):
            more_s, more_bytes = self._change(number, layout, "batch")
            time_s, memory_bytes = time_s + more_s, memory_bytes + more_bytes
        for way in ways:
            if way.memory_bytes + memory_bytes <= self.limit:
                yield _Way(way.time_s + time_s, way.memory_bytes + memory_bytes, way.split, way.before)

    def _operator(self, number: int, name: str) -> tuple[float, float]:
        """Seconds per example and bytes of an operator, and of an output of the model as it is handed out."""
        key = number, name
        if key not in self._operators:
            time_s, memory_bytes = self._measures(self.costs.operator(number, name))
            if not self.graph.consumers[number]:
                more_s, more_bytes = self._change(number, SPLITS[name].gives, "batch")
                time_s, memory_bytes = time_s + more_s, memory_bytes + more_bytes
            self._operators[key] = time_s, memory_bytes
        return self._operators[key]

    def _change(self, producer: int, before: str, after: str) -> tuple[float, float]:
        """Seconds per example and bytes of a change of an operator's output."""
        key = producer, before, after
        if key not in self._changes:
            output_bytes = self.graph.operators[producer].output_bytes
            self._changes[key] = self._measures(self.costs.change(output_bytes, before, after))
        return self._changes[key]

    def _measures(self, work: Work) -> tuple[float, float]:
        model, costs = self.costs.model, self.costs
        busy_s = (work.forward_s + work.backward_s) * costs.microbatches
        sync_s = work.synced_bytes * model.ring(costs.replicas)[0]
        memory_bytes = 0.0
        if self.examples is not None:
            memory_bytes = model.cluster.weight_copies * work.weight_bytes + self.examples * work.activation_bytes
        return (busy_s + sync_s) / model.batch_examples, memory_bytes


def _undominated(ways: list[_Way]) -> list[_Way]:
    """By ascending time, those that need less memory than all faster ones; some of them if there are many."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.time_s, way.memory_bytes)):
        if not kept or way.memory_bytes < kept[-1].memory_bytes:
            kept.append(way)
    if len(kept) > MOST_WAYS:
        kept = [kept[round(place)] for place in np.linspace(0, len(kept) - 1, MOST_WAYS)]
    return kept


def fastest_splits(
    costs: SplitModel, order: Sequence[int], in_flight_examples: float | None = None
) -> tuple[str, ...] | None:
    """The splits with which a stage of the operators of `order` computes fastest.

    Their time is that of computation, collectives and the all-reduce of gradients. Transfers between stages, which
    overlap with it, do not depend on the splits.

    Args:
        costs: of the operators on the stage's devices.
        order: the operators, in topological order.
        in_flight_examples: of the stage; None: memory does not matter.

    Returns:
        None if no splits fit the memory.
    """
    found = dict(_Program(costs, order, in_flight_examples).runs(0, [len(order)]))
    return found[len(order)].splits() if found else None


class SplitSearch:
    """Times of the runs between some borders of a chain, with the fastest splits; where they are no faster, by batch.

    Args:
        chain: the costs of all runs that divide the batch, in the graph's own order.
        borders: positions in the order at which runs can begin and end.

    Attributes:
        times: [positions, replica choices, starts, ends]: seconds per example; infinite: does not fit.
    """

    def __init__(self, chain: ChainSearch, borders: Sequence[int]) -> None:
        self.chain = chain
        self.borders = borders
        starts, ends = borders[:-1], borders
        whole = chain.times[:, starts][:, :, ends]
        fits = chain.fits[:, :, starts][:, :, :, ends]
        self.times = np.where(fits, whole, np.inf)
        self._splits: dict[tuple[int, int, int, int], tuple[str, ...]] = {}
        self._number_of = {border: number for number, border in enumerate(borders)}
        for choice, replicas in enumerate(chain.replicas.tolist()):
            if replicas > 1:
                costs = SplitModel(chain.model, replicas, chain.microbatches)
                for start in range(len(starts)):
                    self._search(choice, costs, start)

    def _search(self, choice: int, costs: SplitModel, start: int) -> None:
        """Fill in the runs that begin at one border: the fastest, and those that fit where the fastest do not."""
        fastest = self._runs(costs, start, None)
        small: dict[int, dict[int, _Run]] = {}
        for position in range(len(self.times)):
            examples = self._in_flight(position)
            found = {end: run for end, run in fastest.items() if self._fits(run[1], examples)}
            if self._can_fit_more(costs, start, examples, found):
                # Rounded up to a power of two: few programs, and what they find fits.
                rounded = 1 << (examples - 1).bit_length()
                if rounded not in small:
                    small[rounded] = self._runs(costs, start, rounded)
                found = {**small[rounded], **found}
            for end, (splits, work) in found.items():
                transfer_bytes = float(self.chain.sums["transfer_bytes"][self.borders[start], self.borders[end]])
                time_s = costs.time_per_example(work, transfer_bytes)
                if not is_batch(splits) and time_s < self.times[position, choice, start, end]:
                    self.times[position, choice, start, end] = time_s
                    self._splits[position, choice, start, end] = splits

    def _runs(self, costs: SplitModel, start: int, examples: int | None) -> dict[int, _Run]:
        """Number of the border at the end -> the fastest way."""
        found = {}
        for end, way in _Program(costs, self.chain.order, examples).runs(
            self.borders[start], self.borders[start + 1 :]
        ):
            mask = self.chain.placed(self.borders[start], end, costs.replicas).mask
            found[self._number_of[end]] = way.splits(), costs.stage(mask, way.splits())
        return found

    def _can_fit_more(self, costs: SplitModel, start: int, examples: int, found: Mapping[int, _Run]) -> bool:
        """Whether a run that does not fit would fit if each of its operators needed the least memory."""
        order, cluster = self.chain.order[self.borders[start] :], self.chain.model.cluster
        least = 0.0
        for position, number in enumerate(order, start=self.borders[start] + 1):
            names = split_names(costs.model.graph.operators[number], costs.replicas)
            works = [costs.operator(number, name) for name in names]
            least += min(cluster.weight_copies * work.weight_bytes + examples * work.activation_bytes for work in works)
            if least > cluster.memory_bytes:
                return False
            if position in self._number_of and self._number_of[position] not in found:
                return True
        return False

    def _in_flight(self, position: int) -> int:
        """Examples in flight of a stage with so many after it, as `ChainSearch` counts them."""
        count, batch = self.chain.microbatches, self.chain.model.batch_examples
        return -(min(position + 1, count) * batch // -count)

    def _fits(self, work: Work, examples: int) -> bool:
        cluster = self.chain.model.cluster
        return cluster.weight_copies * work.weight_bytes + examples * work.activation_bytes <= cluster.memory_bytes

    def placed(self, position: int, choice: int, start: int, end: int) -> Placed:
        """The stage of a run with so many stages after it."""
        stage = self.chain.placed(self.borders[start], self.borders[end], int(self.chain.replicas[choice]))
        return replace(stage, splits=self._splits.get((position, choice, start, end), ()))
