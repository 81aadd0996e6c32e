"""The search for graphs with many branches: dynamic programming on the series-parallel tree (GraphPipe, ASPLOS 2025).

    best(part, depth below) = ways to place a part, each (devices, depth at its start); none fewer and shallower at once
      any part      one stage
      series        the last stretch first: a run of parts as one stage, or a part by itself in front of what is placed
      parallel      each branch by itself, side by side; or several whole branches as one stage
      at a join or fork, one stage may also take the end (or start) of one branch, so that a concat needs no device

All stages have one micro-batch size, so a stage's micro-batches in flight are its depth: one more than the stages it
feeds. The search is not exhaustive: a stage never holds pieces of two branches. On a chain it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.decompose import SPTree, parallel, series
from bagpipe.partition.operators import members, union

__all__ = ["TreeSearch"]

#: Most branches that share a stage with several replicas; any number can share one with the fewest.
_MAX_GROUP = 4


@dataclass(frozen=True, slots=True)
class _Way:
    """A placement of a part: number of devices, depth of its first stages, and its stages as a nested pair."""

    devices: int
    depth: int
    stage: Placed | None = None
    first: _Way | None = None
    second: _Way | None = None

    def stages(self) -> Iterator[Placed]:
        todo: list[_Way | None] = [self]
        while todo:
            way = todo.pop()
            if way is not None:
                if way.stage is not None:
                    yield way.stage
                todo += [way.second, way.first]


def _shallow_or_small(ways: list[_Way], most_devices: int) -> list[_Way]:
    """The Pareto front in devices and depth, by ascending devices."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.devices, way.depth)):
        if way.devices <= most_devices and (not kept or way.depth < kept[-1].depth):
            kept.append(way)
    return kept


class TreeSearch:
    """Feasibility by dynamic programming over the tree.

    Args:
        model: the cost model.
        replicas: allowed replica counts of a stage.
        microbatches: micro-batches per batch of every stage.
        tree: the whole graph.
    """

    def __init__(self, model: CostModel, replicas: Sequence[int], microbatches: int, tree: SPTree) -> None:
        self.model = model
        self.replicas = sorted(replicas)
        self.microbatches = microbatches
        self.tree = tree
        self.devices = model.cluster.devices
        self.tails: dict[int, list[list[tuple[int, SPTree]]]] = {}
        self.heads: dict[int, list[list[tuple[int, SPTree]]]] = {}

    def solve(self, target: float) -> Layout | None:
        """The shallowest layout found whose stages all meet `target` seconds per example, or None."""
        ways = _Attempt(self, target).ways(self.tree, 0)
        return _in_order(self.model, tuple(ways[-1].stages())) if ways else None

    def trimmed(self, tree: SPTree, *, end: bool) -> list[list[tuple[int, SPTree]]]:
        """Per branch, ways to take its end (or start) away, most first: (what is taken, the rest of `tree`).

        Branches of equal costs count once.
        """
        known = self.tails if end else self.heads
        if tree.mask not in known:
            found = {}
            for number, branch in enumerate(tree.parts):
                alike = tuple(self.model.totals(part.mask) for part in branch.parts or (branch,))
                if alike not in found:
                    others = (tree.parts[:number], tree.parts[number + 1 :])
                    found[alike] = [(branch.mask, parallel(*others[0], *others[1]))]
                    parts = branch.parts if branch.kind == "series" else ()
                    for kept in range(1, len(parts)):
                        taken, rest = (parts[kept:], parts[:kept]) if end else (parts[:-kept], parts[-kept:])
                        left = parallel(*others[0], series(*rest), *others[1])
                        found[alike].append((union(part.mask for part in taken), left))
            known[tree.mask] = list(found.values())
        return known[tree.mask]


class _Attempt:
    """One target time."""

    def __init__(self, search: TreeSearch, target: float) -> None:
        self.search = search
        self.model = search.model
        self.target = target
        self._ways: dict[tuple[int, int], list[_Way]] = {}
        self._stages: dict[tuple[int, int], _Way | None] = {}

    def stage(self, mask: int, below: int) -> _Way | None:
        """The operators as one stage, or None."""
        key = mask, below
        if key not in self._stages:
            self._stages[key] = self._stage(mask, below)
        return self._stages[key]

    def _stage(self, mask: int, below: int) -> _Way | None:
        count, batch = self.search.microbatches, self.model.batch_examples
        examples = -(min(below + 1, count) * batch // -count)
        replicas = self.model.least_replicas(mask, count, examples, self.target, self.search.replicas)
        return None if replicas is None else _Way(replicas, below + 1, Placed(mask, replicas, count))

    def ways(self, tree: SPTree, below: int) -> list[_Way]:
        """Ways to place `tree` in front of stages of depth `below`; by devices ascending and depth descending."""
        key = tree.mask, below
        if key not in self._ways:
            whole = self.stage(tree.mask, below)
            ways = [] if whole is None else [whole]
            if tree.kind == "series":
                ways += self._series(tree.parts, below)
            elif tree.kind == "parallel":
                ways += self._parallel(tree.parts, below)
            self._ways[key] = _shallow_or_small(ways, self.search.devices)
        return self._ways[key]

    def _series(self, parts: Sequence[SPTree], below: int) -> list[_Way]:
        """``placed[n]``: ways to place parts n, n+1, … in front of `below`."""
        placed: list[list[_Way]] = [[] for _ in parts] + [[_Way(0, below)]]
        for end in range(len(parts), 0, -1):
            placed[end] = _shallow_or_small(placed[end], self.search.devices)
            for later in placed[end]:
                placed[end - 1] += self._before(parts[end - 1], later)
                run = 0
                for start in range(end - 1, -1, -1):
                    run |= parts[start].mask
                    stage = self.stage(run, later.depth)
                    if stage is None and self._is_too_slow(run):
                        break
                    if stage is not None:
                        placed[start].append(_both(stage, later))
                    if start and parts[start - 1].kind == "parallel":
                        placed[start - 1] += self._with_tail(run, parts[start - 1], later)
            if parts[end - 1].kind == "parallel" and end > 1:
                for later in placed[end]:
                    for start, way in self._with_head(parts, end - 1, later):
                        placed[start].append(way)
        return placed[0]

    def _is_too_slow(self, mask: int) -> bool:
        """No number of replicas keeps these operators, or more, to the target."""
        totals = self.model.totals(mask)
        fixed = totals.fixed_s * self.search.microbatches / self.model.batch_examples
        return max(fixed, totals.per_example_s / self.search.replicas[-1]) > self.target

    def _before(self, part: SPTree, later: _Way) -> list[_Way]:
        return [_both(way, later) for way in self.ways(part, later.depth)]

    def _with_tail(self, run: int, branches: SPTree, later: _Way) -> Iterator[_Way]:
        """A join (and what follows in `run`) in one stage with the end of one branch."""
        for trims in self.search.trimmed(branches, end=True):
            tried = set()
            for taken, rest in trims:
                stage = self.stage(run | taken, later.depth)
                # With as many devices, to take more from the branch is better.
                if stage is not None and stage.devices not in tried:
                    tried.add(stage.devices)
                    yield from self._before(rest, _both(stage, later))

    def _with_head(self, parts: Sequence[SPTree], position: int, later: _Way) -> Iterator[tuple[int, _Way]]:
        """A fork (and what precedes it) in one stage with the start of one branch of ``parts[position]``."""
        for trims in self.search.trimmed(parts[position], end=False):
            tried = set()
            for taken, rest in trims:
                run = taken
                for start in range(position - 1, -1, -1):
                    run |= parts[start].mask
                    if self._is_too_slow(run):
                        break
                    for way in self._before(rest, later):
                        stage = self.stage(run, way.depth)
                        if stage is not None and (start, stage.devices, way.depth) not in tried:
                            tried.add((start, stage.devices, way.depth))
                            yield start, _both(stage, way)

    def _parallel(self, branches: Sequence[SPTree], below: int) -> list[_Way]:
        slow_first = sorted(branches, key=lambda b: -self.model.totals(b.mask).per_example_s)
        return self._grouped(slow_first, below) + self._packed(slow_first, below)

    def _grouped(self, branches: Sequence[SPTree], below: int) -> list[_Way]:
        """Each branch by itself, or a few neighbours as one stage; ``placed[n]``: the first n branches."""
        placed: list[list[_Way]] = [[_Way(0, below)]] + [[] for _ in branches]
        for start, branch in enumerate(branches):
            placed[start] = ways = _shallow_or_small(placed[start], self.search.devices)
            if not ways:
                continue
            alone = self.ways(branch, below)
            placed[start + 1] += [_beside(way, one) for way in ways for one in alone]
            group = branch.mask
            for end in range(start + 1, min(start + _MAX_GROUP, len(branches))):
                group |= branches[end].mask
                stage = self.stage(group, below)
                if stage is None and self._is_too_slow(group):
                    break
                if stage is not None:
                    placed[end + 1] += [_beside(way, stage) for way in ways]
        return placed[-1]

    def _packed(self, branches: Sequence[SPTree], below: int) -> list[_Way]:
        """Branches that need less than a device share one, each put where it first fits; the others by themselves."""
        shared: list[_Way] = []
        alone = _Way(0, below)
        for branch in branches:
            stage = self.stage(branch.mask, below)
            if stage is None or stage.stage is None or stage.devices > self.search.replicas[0]:
                ways = self.ways(branch, below)
                if not ways:
                    return []
                alone = _beside(alone, ways[0])
                continue
            for number, other in enumerate(shared):
                both = self.stage(stage.stage.mask | (other.stage.mask if other.stage else 0), below)
                if both is not None and both.devices == stage.devices:
                    shared[number] = both
                    break
            else:
                shared.append(stage)
        for way in shared:
            alone = _beside(alone, way)
        return [alone]


def _both(first: _Way, later: _Way) -> _Way:
    return _Way(first.devices + later.devices, first.depth, None, first, later)


def _beside(one: _Way, other: _Way) -> _Way:
    return _Way(one.devices + other.devices, max(one.depth, other.depth), None, one, other)


def _in_order(model: CostModel, stages: Layout) -> Layout:
    """The stages in topological order."""
    position = {operator: number for number, operator in enumerate(model.graph.order)}
    left, done, ordered = list(stages), 0, []
    while left:
        ready = [s for s in left if all(not model.graph.producers[n] & ~(done | s.mask) for n in members(s.mask))]
        chosen = min(ready, key=lambda s: min(position[n] for n in members(s.mask)))
        left.remove(chosen)
        ordered.append(chosen)
        done |= chosen.mask
    return tuple(ordered)
