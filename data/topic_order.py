"""`Turn`: the order in which the partitions of a topic are read: in turns, so many offsets of each.

    leg: offsets of all partitions at its start ──turn 0: partition 0, turn 1: partition 1, …, turn P: partition 0 again

    start (5, 0), run 10     turn 0: 0[5, 15)   turn 1: 1[0, 10)   turn 2: 0[15, 25)   …
    the stream ends at (18, 4): the same, cut there: 0[5, 15)  1[0, 4)  0[15, 18). The next leg starts at (18, 4).

The order is a function of offsets alone. A turn is read when all of its offsets are there, so a partition that gets few
messages holds the others up. Where a stream ends, the leg is *closed*: what is there is read, in shorter turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError

__all__ = ["Leg", "Turn", "leg_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Offsets ``[start, stop)`` of a partition."""

    partition: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Turns from some offsets on.

    Attributes:
        start: first offset of each partition.
        stop: the offset of each partition at which it ends; None: it is open.
        run: offsets of a turn.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...] | None
    run: int

    def turn(self, number: int) -> Turn:
        """A turn. Of a closed leg it can be empty."""
        turns, partition = divmod(number, len(self.start))
        start = self.start[partition] + turns * self.run
        stop = start + self.run
        if self.stop is None:
            return Turn(partition=partition, start=start, stop=stop)
        end = self.stop[partition]
        return Turn(partition=partition, start=min(start, end), stop=min(stop, end))

    def offsets(self, number: int) -> tuple[int, ...]:
        """The offset of each partition that is read next, before a turn."""
        later = range(number, number + len(self.start))
        turns = sorted((self.turn(each) for each in later), key=lambda turn: turn.partition)
        return tuple(turn.start for turn in turns)

    def num_turns(self) -> int:
        """Turns of a closed leg up to its last message."""
        assert self.stop is not None, "an open leg has no end"
        count = len(self.start)
        ends = (
            (-(-(stop - start) // self.run) - 1) * count + partition + 1
            for partition, (start, stop) in enumerate(zip(self.start, self.stop, strict=True))
            if stop > start
        )
        return max(ends, default=0)

    def closed(self, ends: tuple[int, ...], number: int) -> Leg:
        """The leg that ends at these offsets, and not before what was read before turn `number`."""
        stop = tuple(map(max, self.offsets(number), ends))
        return Leg(start=self.start, stop=stop, run=self.run)

    def to_place(self, number: int) -> dict[str, Any]:
        """JSON-able: the position before a turn. ``offsets`` is for people."""
        stop = None if self.stop is None else list(self.stop)
        return {"start": list(self.start), "stop": stop, "turn": number, "offsets": list(self.offsets(number))}


def leg_of(place: Mapping[str, Any], name: str, num_partitions: int, run: int) -> tuple[Leg, int]:
    """The leg and the turn of a place, which a stranger may have written.

    Raises:
        InputError: it is no place of a topic, or of one with another number of partitions.
    """
    start, stop, turn = (place.get(key) for key in ("start", "stop", "turn"))
    if not _are_offsets(start) or not (stop is None or _are_offsets(stop)) or not _are_offsets([turn]):
        raise InputError(f"loader state: expected offsets of {name}, got {str(dict(place))[:80]}")
    assert isinstance(start, list), "checked"
    assert isinstance(turn, int), "checked"
    if len(start) != num_partitions or (stop is not None and len(stop) != num_partitions):
        raise InputError(f"{name}: expected the {len(start)} partitions of the job so far, got {num_partitions}")
    leg = Leg(start=tuple(start), stop=None if stop is None else tuple(stop), run=run)
    return leg, turn


def _are_offsets(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
