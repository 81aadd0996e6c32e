"""Contestants of one comparison take turns, and their figures are compared round by round.

turns(names, rounds) ──> (round, name) …      every name once per round
samples per name ──median, quartiles──> Spread;  paired_ratios: each round's sample over the baseline's of that round
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

__all__ = ["Spread", "medians", "paired_ratios", "time_rounds", "timed", "turns"]

T = TypeVar("T")


def turns(names: Sequence[str], rounds: int, *, shuffle_seed: int | None = None) -> Iterator[tuple[int, str]]:
    """Every name once per round.

    Args:
        names: of the contestants.
        rounds: number of rounds.
        shuffle_seed: draws a new order for every round. None reverses the order in every second round, which
            balances two contestants exactly.
    """
    generator = random.Random(shuffle_seed)
    for number in range(rounds):
        order = list(names)
        if shuffle_seed is not None:
            generator.shuffle(order)
        elif number % 2:
            order.reverse()
        for name in order:
            yield number, name


def timed(
    call: Callable[[], T], repeats: int = 1, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, T]:
    """Median seconds of a call over `repeats`, and its last result."""
    seconds: list[float] = []
    while True:
        start_s = clock()
        result = call()
        seconds.append(clock() - start_s)
        if len(seconds) >= repeats:
            return statistics.median(seconds), result


def time_rounds(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmups: int = 0,
    shuffle_seed: int | None = None,
) -> dict[str, list[float]]:
    """Seconds of every call in every round. The `warmups` rounds before them do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number, name in turns(list(calls), warmups + rounds, shuffle_seed=shuffle_seed):
        start_s = time.perf_counter()
        calls[name]()
        if number >= warmups:
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each contestant."""
    return {name: statistics.median(values) for name, values in samples.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, quartiles and extremes of samples."""

    median: float
    low_quartile: float
    high_quartile: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Of at least one sample. Quartiles are samples, not interpolated."""
        ordered = sorted(samples)
        quarter = len(ordered) // 4
        return cls(
            median=statistics.median(ordered),
            low_quartile=ordered[quarter],
            high_quartile=ordered[-1 - quarter],
            least=ordered[0],
            most=ordered[-1],
        )


def paired_ratios(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Spread of sample / baseline over rounds, which cancels what slows both down. ValueError: lengths differ."""
    return Spread.of([own / base for own, base in zip(samples, baseline, strict=True)])
