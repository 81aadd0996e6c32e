"""`plan_moves`: which chunks come to the device and leave it, and when, for a number of slots. Pure data.

    trace, slots, lookahead ──EvictionQueue──> what leaves for what comes      ──earliest moments──> MovePlan

The victim is the chunk whose next use is farthest (Belady 1966), by the queue that the row cache evicts with
(`bagpipe.oracle.eviction`); a chunk whose content is dead goes before all others. Batches repeat the trace, so next
uses go on into the next batch. The plan covers as many batches as it takes until the chunks on the device are those of
the beginning, and is walked again and again.

*Lookahead*: a moment asks for the chunks of so many later moments too, as far as there is room, so a copy has their
time. With 0 a batch has the fewest fetches. A move begins as early as it can: right after the last use of what leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np

from bagpipe.dense.chunks.moments import Trace
from bagpipe.errors import ScheduleError
from bagpipe.oracle.eviction import NEVER_PRIORITY, EvictionQueue

__all__ = ["Move", "MovePlan", "plan_moves"]

#: Batches after which a plan that has not come back to its beginning is cut.
_MAX_BATCHES = 12


@dataclass(frozen=True, slots=True)
class Move:
    """A chunk comes or leaves.

    Attributes:
        moment: before which it begins, once the moments before are done; counted over the batches of the plan.
        chunk: its number.
        to: where it is afterwards.
        copies: its content is copied; otherwise the slot only changes hands.
    """

    moment: int
    chunk: int
    to: Literal["device", "host"]
    copies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """The moves of one or more batches, which begin and end with the same chunks on the device.

    Attributes:
        trace: of one batch.
        num_batches: batches of the plan.
        num_slots: chunks that the device holds.
        starts: by batch, the chunks on the device, or on the way, when it begins.
        moves: in order; those of a moment leave before others come.
    """

    trace: Trace
    num_batches: int
    num_slots: int
    starts: tuple[frozenset[int], ...]
    moves: tuple[Move, ...]

    def by_moment(self) -> Mapping[int, Sequence[Move]]:
        """Moves that begin before each moment."""
        found: dict[int, list[Move]] = defaultdict(list)
        for move in self.moves:
            found[move.moment].append(move)
        return found

    @property
    def num_fetches(self) -> int:
        """Chunks copied to the device."""
        return sum(move.copies and move.to == "device" for move in self.moves)


@dataclass(frozen=True, slots=True)
class _Swap:
    """A chunk comes for a moment, into a free slot or that of another one.

    Attributes:
        at: the moment, counted over all batches.
        begins: the earliest moment before which the swap can be made.
        comes, leaves: chunks.
    """

    at: int
    begins: int
    comes: int
    leaves: int | None


def plan_moves(trace: Trace, num_slots: int, *, lookahead: int = 0) -> MovePlan:
    """Plan the moves of a trace that repeats.

    Args:
        trace: of a batch, at least one moment.
        num_slots: chunks that the device can hold.
        lookahead: moments; see above.

    Raises:
        ScheduleError: a moment uses more chunks than there are slots.
    """
    largest = max(trace, key=lambda moment: len(moment.uses))
    if len(largest.uses) > num_slots:
        raise ScheduleError(f"{largest.name} uses {len(largest.uses)} chunks, the device holds {num_slots}")
    swaps, residents = _swaps(trace, _wanted(trace, num_slots, lookahead), num_slots)
    last = len(residents) - 1
    first = next(batch for batch in range(last + 1) if residents[batch] == residents[last])
    if first == last:  # it never came back: what is missing is moved when the plan begins again
        first = last - 1
    return _closed(trace, num_slots, swaps, residents[first], first, last)


def _wanted(trace: Trace, num_slots: int, lookahead: int) -> list[tuple[int, ...]]:
    """The chunks that each moment asks for: its own first, then those of later moments."""
    wanted = []
    for number in range(len(trace)):
        chosen = dict.fromkeys(use.chunk for use in trace[number].uses)
        for later in range(1, min(lookahead, len(trace) - 1) + 1):
            more = dict.fromkeys(use.chunk for use in trace[(number + later) % len(trace)].uses)
            if len(chosen | more) > num_slots:
                break
            chosen |= more
        wanted.append(tuple(chosen))
    return wanted


def _swaps(trace: Trace, wanted: Sequence[tuple[int, ...]], num_slots: int) -> tuple[list[_Swap], list[frozenset[int]]]:
    """What comes and leaves in some batches, and the chunks on the device at the beginning of each and at the end."""
    length, uses = len(trace), _moments_of([tuple(use.chunk for use in moment.uses) for moment in trace])
    asked, reads = _moments_of(wanted), _reads(trace)
    queue = EvictionQueue(max(asked) + 1)
    held: set[int] = set()
    left: dict[int, int] = {}
    swaps: list[_Swap] = []
    residents: list[frozenset[int]] = []
    for batch in range(_MAX_BATCHES):
        residents.append(frozenset(held))
        if residents.index(residents[-1]) < batch:
            return swaps, residents
        for number, chunks in enumerate(wanted):
            now = batch * length + number
            queue.advance(now)
            queue.push(np.array(chunks), np.full(len(chunks), now, dtype=np.int32))  # none of them leaves
            missing = [chunk for chunk in chunks if chunk not in held]
            victims: list[int] = queue.pop(max(len(held) + len(missing) - num_slots, 0)).tolist()
            # What is needed first comes when the first victim can leave.
            victims.sort(key=lambda victim: _last_use(uses[victim], now, length))
            for chunk, victim in zip_longest(missing, victims):
                begins = now
                if victim is not None:
                    left[victim] = begins = max(_last_use(uses[victim], now, length) + 1, left.get(chunk, 0))
                swaps.append(_Swap(now, begins, chunk, victim))
            held.difference_update(victims)
            held.update(missing)
            later = [batch * length + _next_use(asked[chunk], number, length) for chunk in chunks]
            # What is overwritten at its next use can leave first.
            later = [at if reads[chunk][number] else NEVER_PRIORITY for chunk, at in zip(chunks, later, strict=True)]
            queue.push(np.array(chunks), np.array(later, dtype=np.int32))
    return swaps, [*residents, frozenset(held)]


def _closed(
    trace: Trace, num_slots: int, swaps: Sequence[_Swap], held: frozenset[int], first: int, last: int
) -> MovePlan:
    """The plan of the batches from first to last, which begin with these chunks on the device."""
    begin, end = first * len(trace), last * len(trace)
    start, placed = set(held), []
    for order, swap in enumerate(swaps):
        if not begin <= swap.at < end:
            continue
        moment, is_early = swap.begins - begin, swap.begins < begin
        if is_early:  # begun in the batches before, when the plan is walked again: behind their own moves
            moment = max(moment + end - begin, 0)
            start.discard(-1 if swap.leaves is None else swap.leaves)
            start.add(swap.comes)
        placed.append((moment, is_early, order, swap))
    placed.sort(key=lambda item: item[:3])
    return _with_copies(
        trace, num_slots, frozenset(start), [(moment, swap) for moment, _, _, swap in placed], last - first
    )


def _with_copies(
    trace: Trace, num_slots: int, start: frozenset[int], placed: Sequence[tuple[int, _Swap]], num_batches: int
) -> MovePlan:
    """The plan with what each move copies: what has changed on the device, and what the next use reads."""
    reads = _reads(trace)
    by_moment: dict[int, list[_Swap]] = defaultdict(list)
    for moment, swap in placed:
        by_moment[moment].append(swap)
    changed: set[int] = set()
    starts: list[frozenset[int]] = []
    moves: list[Move] = []
    for _ in range(2):  # the second time, what has changed before the plan begins is known
        held, starts, moves = set(start), [], []
        for moment in range(num_batches * len(trace)):
            number = moment % len(trace)
            if number == 0:
                starts.append(frozenset(held))
            for swap in by_moment[moment]:
                if (leaves := swap.leaves) is not None:
                    moves.append(Move(moment, leaves, "host", leaves in changed and reads[leaves][number - 1]))
                    held.discard(leaves)
                    changed.discard(leaves)
                moves.append(Move(moment, swap.comes, "device", reads[swap.comes][number - 1]))
                held.add(swap.comes)
            changed.update(use.chunk for use in trace[number].uses if use.writes)
    return MovePlan(
        trace=tuple(trace), num_batches=num_batches, num_slots=num_slots, starts=tuple(starts), moves=tuple(moves)
    )


def _moments_of(wanted: Sequence[tuple[int, ...]]) -> Mapping[int, Sequence[int]]:
    """By chunk: the moments that ask for it."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, chunks in enumerate(wanted):
        for chunk in chunks:
            found[chunk].append(number)
    return found


def _reads(trace: Trace) -> Mapping[int, Sequence[bool]]:
    """By chunk and moment: whether its next use after the moment, in the next batch too, reads what it holds."""
    chunks = {use.chunk for moment in trace for use in moment.uses}
    found = {chunk: [False] * len(trace) for chunk in chunks}
    later: dict[int, bool] = {}
    for number in reversed(range(2 * len(trace))):
        for chunk in chunks:
            found[chunk][number % len(trace)] = later.get(chunk, False)
        later.update((use.chunk, use.reads) for use in trace[number % len(trace)].uses)
    return found


def _next_use(moments: Sequence[int], number: int, length: int) -> int:
    """The first of a chunk's moments after a moment, counted on into the next batch."""
    return next((at for at in moments if at > number), moments[0] + length)


def _last_use(moments: Sequence[int], now: int, length: int) -> int:
    """The last of a chunk's moments before a moment, both counted over all batches; below 0: there was none."""
    batch, number = divmod(now, length)
    before = [at for at in moments if at < number]
    return batch * length + before[-1] if before else (batch - 1) * length + moments[-1]
