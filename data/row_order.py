"""Which rows come in which order: windows of raw rows, epochs, permutations, and the position in all that.

    rows [0, limit) = [ training window | held-out window ]       the last floor(eval_fraction * n) rows are held out
    epoch ──Philox(seed, epoch)──> order of segments ──Philox(seed, epoch, block)──> order of a block's rows

Everything here is a pure function of its arguments; the loader only walks it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from data.source import Segment, Source

__all__ = ["STATE_VERSION", "Position", "RowIndex", "Window", "row_permutation", "segment_order", "split"]

STATE_VERSION = 1

# Streams of the same key that must not meet: Philox has a 128-bit key and a counter; the epoch and the block are put
# into the counter's upper words, the purpose in its highest one.
_SEGMENTS, _ROWS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Raw rows ``[low, high)``; `high` None: to the end."""

    low: int
    high: int | None

    def overlaps(self, first: int, rows: int) -> bool:
        return first + rows > self.low and (self.high is None or first < self.high)

    def within(self, first: int, rows: int) -> tuple[int, int]:
        """The part of raw rows ``[first, first + rows)`` in the window, relative to `first`."""
        high = rows if self.high is None else min(rows, max(self.high - first, 0))
        return min(max(self.low - first, 0), high), high


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndex:
    """Where every segment begins: `first_rows[i]` to `first_rows[i + 1]` are the raw rows of segment i."""

    first_rows: tuple[int, ...]

    @classmethod
    def scan(cls, source: Source, segments: tuple[Segment, ...], at_most: int | None) -> RowIndex:
        """Counts rows; segments past `at_most` rows are left uncounted and appear empty."""
        first_rows = [0]
        for segment in segments:
            left = None if at_most is None else at_most - first_rows[-1]
            rows = 0 if left is not None and left <= 0 else source.count_rows(segment, left)
            first_rows.append(first_rows[-1] + rows)
        return cls(first_rows=tuple(first_rows))

    @property
    def num_rows(self) -> int:
        return self.first_rows[-1]

    def overlapping(self, window: Window) -> list[int]:
        """Segments that have rows in the window."""
        bounds = enumerate(pairwise(self.first_rows))
        return [number for number, (first, stop) in bounds if stop > first and window.overlaps(first, stop - first)]


def split(num_rows: int, eval_fraction: float, phase: str) -> Window:
    """The raw rows of a phase of `num_rows`: the last ``floor(eval_fraction * num_rows)`` are held out.

    The fraction is taken as the decimal number it is written as, so 0.1 of 30 rows is 3.
    """
    held_out = math.floor(Fraction(str(eval_fraction)) * num_rows)
    train = num_rows - held_out
    return Window(low=0, high=train) if phase == "train" else Window(low=train, high=num_rows)


def segment_order(numbers: list[int], seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order an epoch visits segments in."""
    if not shuffle:
        return numbers
    keys = _uniforms(len(numbers), seed, epoch, 0, _SEGMENTS)
    return [numbers[position] for position in np.argsort(keys, kind="stable")]


def row_permutation(rows: int, seed: int, epoch: int, segment: int, block: int) -> NDArray[np.int64]:
    """The order in which the rows of one block of one segment are served in an epoch."""
    # a stable sort of uniforms: unlike Generator.permutation its result is fixed for all numpy versions
    return np.argsort(_uniforms(rows, seed, epoch, (segment << 24) | block, _ROWS), kind="stable").astype(np.int64)


def _uniforms(count: int, seed: int, epoch: int, item: int, purpose: int) -> NDArray[np.float64]:
    key = np.array([seed & (2**64 - 1), epoch], np.uint64)
    bits = np.random.Philox(key=key, counter=np.array([0, 0, item, purpose], np.uint64))
    return np.random.Generator(bits).random(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the next row comes from. A plain dict of integers when saved.

    Attributes:
        epoch: passes completed.
        segment: place in the epoch's order of segments.
        block: block of that segment.
        row: rows of that block already served, in serving order.
        first_row: raw row number of the block's first row, where rows are counted at all.
        batch: index of the next batch.
        skipped: bad rows left out so far, this block's included once it has been opened.
        skipped_before: the same, up to this block.
    """

    epoch: int = 0
    segment: int = 0
    block: int = 0
    row: int = 0
    first_row: int = 0
    batch: int = 0
    skipped: int = 0
    skipped_before: int = 0

    def to_state(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """JSON-able form; `order` records what the position depends on."""
        return {"version": STATE_VERSION, **dataclasses.asdict(self), "order": dict(order)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], order: Mapping[str, Any]) -> Position:
        """Inverse of `to_state`.

        Raises:
            InputError: another version, not a loader state, or saved under settings that give another order.
        """
        if state.get("version") != STATE_VERSION:
            raise InputError(f"loader state: expected version {STATE_VERSION}, got {state.get('version')!r}")
        saved = state.get("order", {})
        for key, value in order.items():
            if saved.get(key) != value:
                raise InputError(f"loader state: {key} was {saved.get(key)!r} when saved, is {value!r} now")
        names = [item.name for item in dataclasses.fields(cls)]
        numbers = {name: state.get(name) for name in names}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise InputError(f"loader state: {name} must be an integer from 0, got {number!r}")
        return cls(**{name: int(number) for name, number in numbers.items() if number is not None})
