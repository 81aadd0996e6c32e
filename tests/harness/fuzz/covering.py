"""`cover`: few rows in which every allowed pair of values of two axes occurs. Pure, and a function of its arguments.

axes, problem ──uncovered pair, completed value by value to what covers most──> row ──again──> Covering: rows, refused

The greedy way of AETG (Cohen, Dalal, Fredman, Patton 1997): of some candidates for a row the one with the most
uncovered pairs is taken, then the next row is made. Rows that the later ones make needless are dropped at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

__all__ = ["Axes", "Covering", "Pair", "Row", "all_pairs", "cover", "pairs_of"]

#: Axis -> its values -> their weights. One of weight 0.5 is taken where it covers twice as much as the others.
Axes = Mapping[str, Mapping[str, float]]
#: Axis -> value, of all axes or of some.
Row = Mapping[str, str]
#: A value with its axis.
Item = tuple[str, str]
#: Two values in the order of their axes.
Pair = tuple[Item, Item]
#: Axis -> values that a row may still take.
Domains = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Covering:
    """A covering array.

    Attributes:
        rows: each with a value of every axis.
        refused: pairs that no row can have -> why.
    """

    rows: tuple[Row, ...]
    refused: Mapping[Pair, str]


def all_pairs(axes: Axes) -> list[Pair]:
    """Every two values of different axes."""
    return [
        ((one, first), (two, second))
        for one, two in combinations(axes, 2)
        for first in axes[one]
        for second in axes[two]
    ]


def pairs_of(row: Row, axes: Iterable[str]) -> list[Pair]:
    """The pairs that occur in a row; `axes` gives their order."""
    return list(combinations([(axis, row[axis]) for axis in axes if axis in row], 2))


def cover(axes: Axes, problem: Callable[[Row], str], *, seed: int = 0, num_candidates: int = 3) -> Covering:
    """Rows with every pair that is allowed.

    Args:
        axes: two or more.
        problem: why some values do not go together; empty: they do. What it refuses, it refuses with more values too.
        seed: decides between values that cover as much.
        num_candidates: for each row.
    """
    rules = _Rules(axes, problem)
    uncovered = dict.fromkeys(all_pairs(axes))
    rows: list[Row] = []
    refused: dict[Pair, str] = {}
    while uncovered:
        pair = _most_wanted(uncovered)
        draws = [Random(f"{seed} {len(rows)} {number}") for number in range(num_candidates)]
        candidates = _candidates(rules, pair, uncovered, draws)
        if not candidates:
            refused[pair] = rules.why_not(pair)
            del uncovered[pair]
            continue
        row = max(candidates, key=lambda row: sum(pair in uncovered for pair in pairs_of(row, axes)))
        rows.append({axis: row[axis] for axis in axes})
        for found in pairs_of(row, axes):
            uncovered.pop(found, None)
    return Covering(rows=tuple(_needed(rows, axes)), refused=refused)


class _Rules:
    """What `problem` says, and which values each value goes with.

    Args:
        axes, problem: as for `cover`.

    Attributes:
        places: of the axes in their order.
        dead_ends: how often no value of an axis was left; such an axis is completed before others.
        refused: pairs that do not go together by themselves.
    """

    def __init__(self, axes: Axes, problem: Callable[[Row], str]) -> None:
        self.axes = axes
        self.places = {axis: place for place, axis in enumerate(axes)}
        self.dead_ends = Counter[str]()
        self._problem = problem
        self._last = ""
        self.refused = frozenset(pair for pair in all_pairs(axes) if not self.is_allowed(dict(pair)))

    def is_allowed(self, row: Row) -> bool:
        """Whether the values of a row go together."""
        found = self._problem(row)
        self._last = found or self._last
        return not found

    def pair(self, one: Item, two: Item) -> Pair:
        """Two values in the order of their axes."""
        return (one, two) if self.places[one[0]] < self.places[two[0]] else (two, one)

    def beside(self, domains: Domains, item: Item) -> Domains | None:
        """Of the values left for each axis those that go with one more; None: an axis has none."""
        found = {
            axis: [name for name in names if self.pair(item, (axis, name)) not in self.refused]
            for axis, names in domains.items()
        }
        return found if all(found.values()) else None

    def why_not(self, pair: Pair) -> str:
        """Why a pair is in no row: of itself, or what refused the last completion of it."""
        return self._problem(dict(pair)) or f"with every further value: {self._last or 'an axis has no value left'}"


def _candidates(rules: _Rules, pair: Pair, uncovered: Mapping[Pair, None], draws: Sequence[Random]) -> list[Row]:
    """Allowed rows with a pair, one for each source of random numbers; none: there is no such row."""
    if pair in rules.refused:
        return []
    rows: list[Row] = []
    for rng in draws:
        rest = [axis for axis in rules.axes if axis not in dict(pair)]
        rng.shuffle(rest)
        domains: Domains | None = {axis: [*rules.axes[axis]] for axis in rest}
        for item in pair:
            domains = domains if domains is None else rules.beside(domains, item)
        row = None if domains is None else _completed(rules, dict(pair), domains, uncovered, rng)
        if row is None:
            return []
        rows.append(row)
    return rows


def _completed(rules: _Rules, row: Row, domains: Domains, uncovered: Mapping[Pair, None], rng: Random) -> Row | None:
    """The row with a value of each other axis; None: there is none. Values that cover the most are tried first."""
    if not domains:
        return row
    axis = max(domains, key=lambda axis: rules.dead_ends[axis])
    others = {other: names for other, names in domains.items() if other != axis}
    worth = {}
    for name in domains[axis]:
        weight = rules.axes[axis][name]
        gain = sum(rules.pair(item, (axis, name)) in uncovered for item in row.items())
        worth[name] = (gain * weight, weight * rng.random())
    for name in sorted(worth, key=lambda name: worth[name], reverse=True):
        left, longer = rules.beside(others, (axis, name)), {**row, axis: name}
        if left is not None and rules.is_allowed(longer):
            found = _completed(rules, longer, left, uncovered, rng)
            if found is not None:
                return found
    rules.dead_ends[axis] += 1
    return None


def _most_wanted(uncovered: Mapping[Pair, None]) -> Pair:
    """The pair whose two values occur in most uncovered pairs; the first of several."""
    counts = Counter(item for pair in uncovered for item in pair)
    return max(uncovered, key=lambda pair: counts[pair[0]] + counts[pair[1]])


def _needed(rows: Sequence[Row], axes: Axes) -> list[Row]:
    """The rows without those whose pairs all occur in others."""
    counts = Counter(pair for row in rows for pair in pairs_of(row, axes))
    kept = []
    for row in rows:
        pairs = pairs_of(row, axes)
        if all(counts[pair] > 1 for pair in pairs):
            counts.subtract(pairs)
        else:
            kept.append(row)
    return kept
