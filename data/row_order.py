"""Order of rows: ranges of raw rows, epochs, permutations, and the position in that order.

    rows [0, limit) = [ training rows | held-out rows ]       the last floor(eval_fraction * n) rows are held out
    epoch ──Philox(seed, epoch)──> order of segments ──Philox(seed, epoch, block)──> order of a block's or group's rows

Pure functions only; the loader walks the order.
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

__all__ = [
    "STATE_VERSION",
    "Position",
    "RowIndex",
    "RowRange",
    "group_permutation",
    "row_permutation",
    "segment_order",
    "split",
]

STATE_VERSION = 1

# Philox has a 128-bit key and a counter. Segment and block go into an upper word of the counter, the purpose into the
# highest one, so that streams of one key never overlap.
_SEGMENTS, _ROWS, _GROUPS = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Raw rows ``[low, high)``; `high` None: to the end."""

    low: int
    high: int | None

    def overlaps(self, first: int, rows: int) -> bool:
        return first + rows > self.low and (self.high is None or first < self.high)

    def within(self, first: int, rows: int) -> tuple[int, int]:
        """The part of raw rows ``[first, first + rows)`` in the range, relative to `first`."""
        high = rows if self.high is None else min(rows, max(self.high - first, 0))
        return min(max(self.low - first, 0), high), high


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIndex:
    """First raw row of every segment: segment i holds rows `first_rows[i]` to `first_rows[i + 1]`."""

    first_rows: tuple[int, ...]

    @classmethod
    def scan(cls, source: Source, segments: tuple[Segment, ...], at_most: int | None) -> RowIndex:
        """Count the rows of all segments. Segments after the first `at_most` rows are not counted and appear empty."""
        first_rows = [0]
        for segment in segments:
            left = None if at_most is None else at_most - first_rows[-1]
            rows = 0 if left is not None and left <= 0 else source.count_rows(segment, left)
            first_rows.append(first_rows[-1] + rows)
        return cls(first_rows=tuple(first_rows))

    @property
    def num_rows(self) -> int:
        return self.first_rows[-1]

    def overlapping(self, row_range: RowRange) -> list[int]:
        """Numbers of the segments with rows in the range."""
        bounds = enumerate(pairwise(self.first_rows))
        return [number for number, (first, stop) in bounds if stop > first and row_range.overlaps(first, stop - first)]


def split(num_rows: int, eval_fraction: float, phase: str) -> RowRange:
    """The raw rows of a phase: the last ``floor(eval_fraction * num_rows)`` rows are held out for evaluation.

    Reads the fraction as the decimal number that was written, so 0.1 of 30 rows is 3.
    """
    held_out = math.floor(Fraction(str(eval_fraction)) * num_rows)
    train = num_rows - held_out
    return RowRange(low=0, high=train) if phase == "train" else RowRange(low=train, high=num_rows)


def segment_order(numbers: list[int], seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of an epoch's segments."""
    if not shuffle:
        return numbers
    keys = _uniforms(len(numbers), seed, epoch, 0, _SEGMENTS)
    return [numbers[position] for position in np.argsort(keys, kind="stable")]


def row_permutation(rows: int, seed: int, epoch: int, segment: int, block: int) -> NDArray[np.int64]:
    """The serving order of the rows of one block in an epoch."""
    # A stable sort of uniforms gives the same result in all numpy versions; Generator.permutation does not.
    return np.argsort(_uniforms(rows, seed, epoch, (segment << 24) | block, _ROWS), kind="stable").astype(np.int64)


def group_permutation(rows: int, seed: int, epoch: int, segment: int, block: int) -> NDArray[np.int64]:
    """The serving order of the rows of a group of blocks, which begins with this block."""
    return np.argsort(_uniforms(rows, seed, epoch, (segment << 24) | block, _GROUPS), kind="stable").astype(np.int64)


def _uniforms(count: int, seed: int, epoch: int, item: int, purpose: int) -> NDArray[np.float64]:
    key = np.array([seed & (2**64 - 1), epoch], np.uint64)
    bits = np.random.Philox(key=key, counter=np.array([0, 0, item, purpose], np.uint64))
    return np.random.Generator(bits).random(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of the next row. Saved as a dict of integers.

    Attributes:
        epoch: passes completed.
        segment: index in the epoch's order of segments.
        block: block of that segment.
        row: rows of that block already served, in serving order.
        first_row: raw row number of the block's first row, if rows are counted.
        batch: index of the next batch.
        skipped: bad rows skipped so far, including all of this block once it is open.
        skipped_before: bad rows skipped before this block.
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
        """JSON-able form; `order` holds the settings that the position depends on."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return {"version": STATE_VERSION, **fields, "order": dict(order)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], order: Mapping[str, Any]) -> Position:
        """Inverse of `to_state`.

        A state can come from a stranger. What the data alone can tell is checked where it is read.

        Raises:
            InputError: another version, not a loader state, saved under settings that give another order, or numbers
                that no loader saves.
        """
        if state.get("version") != STATE_VERSION:
            raise InputError(f"loader state: expected version {STATE_VERSION}, got {state.get('version')!r}")
        saved = state.get("order")
        if not isinstance(saved, Mapping):
            raise InputError(f"loader state: expected the settings of its order, got {str(saved)[:80]!r}")
        for key, value in order.items():
            if saved.get(key) != value:
                raise InputError(f"loader state: {key} was {saved.get(key)!r} when saved, is {value!r} now")
        numbers = {name: state.get(name) for name in _FIELDS}
        for name, number in numbers.items():
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < _MOST:
                raise InputError(f"loader state: {name} must be an integer from 0, got {repr(number)[:80]}")
        share = state.get("share")
        if share is not None and (not isinstance(share, (int, float)) or not 0 <= share <= 1):
            raise InputError(f"loader state: share must be a number from 0 to 1, got {str(share)[:80]}")
        position = cls(**{name: int(number) for name, number in numbers.items() if number is not None})
        position._check_sums(order)
        return position

    def _check_sums(self, order: Mapping[str, Any]) -> None:
        """Check what the numbers say of each other.

        Raises:
            InputError: no loader saves them together.
        """
        if self.skipped_before > self.skipped:
            raise InputError(f"loader state: {self.skipped} rows skipped, and {self.skipped_before} before the block")
        is_counted = order.get("phase") == "train" and not order.get("shuffle") and not self.epoch
        is_counted = is_counted and not order.get("stream")  # a stream that went on after an end has smaller batches
        if is_counted:  # raw rows are counted from 0 on, and each batch but the last is full
            served = self.first_row - self.skipped_before + self.row
            batch = -(-served // int(order["batch_size"]))
            if served < 0 or self.batch != batch:
                raise InputError(f"loader state: batch must be {batch} after {served} rows, got {self.batch}")


#: Above the numbers of any data.
_MOST = 1 << 62

#: Names of the position's numbers.
_FIELDS = tuple(item.name for item in dataclasses.fields(Position))
