"""`NextUseSort`: the distance from every use of a row to its next one, by an external sort in bounded memory.

    add(ids of a block) ──hash──> keys and positions on disk: part by part, in a part by group, in a group by block
    solve()             group by group, backwards: sort (key, occurrence) ──> distance to the next use ──> disk
    distances(block)    read back in the order of `add`

A *block* is a run of consecutive examples, a *part* some consecutive blocks that are written together. A *group* is the
rows of one table with the same first bits of their hash, so all uses of a row are in one group. A group that does not
fit memory because a few rows have most uses is sorted in runs of parts, from the last to the first; what is carried
along is one entry per distinct row.

The hash is one to one: ids are found again from their keys, and distances are exact. The bounds of the groups in parts
and blocks are on disk too; memory holds those of a few groups at a time, see `TABLE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from data.spill_file import SpillFile

__all__ = ["ENTRY_BYTES", "FAR", "MOST_GROUPS", "NextUseSort", "TableUses", "groups_for"]

_Word = TypeVar("_Word", np.uint32, np.uint64)

#: By table: int64 ids, and the example of each in its block, uint32, ascending.
TableUses: TypeAlias = Sequence[tuple[NDArray[np.int64], NDArray[np.uint32]]]

#: A distance of at least so many examples, or no next use.
FAR = (1 << 32) - 1

#: An odd number near 2**64 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): multiplying by
#: it maps 64-bit ids one to one, and spreads those that differ in low bits over the high bits.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
#: Its inverse modulo 2**64.
_GATHER = np.uint64(pow(int(_SPREAD), -1, 1 << 64))
#: Memory of a sort, in bytes per entry: keys, positions, words and what is made of them.
ENTRY_BYTES = 96
#: Memory of the bounds of the groups that are sorted at a time; a group alone may have 24 B per part.
TABLE_BYTES = 16 << 20
#: Most groups of a table: their numbers have 16 bits, so that the sort by group is a radix sort.
MOST_GROUPS = 1 << 16
#: A sort of up to so many entries takes 38 ns an entry, one of four times as many 55 to 65.
_CACHED_ENTRIES = 1 << 20
#: Groups whose pieces in a block of 65,536 examples still have 1,024 entries.
_FEW_GROUPS = 64
#: Entries of a group in a part, on average, unless memory holds fewer: pieces of 8 KiB and more on disk.
_PIECE_ENTRIES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """Distinct rows of later parts: key, first position there, and entry and position of the last use in the group."""

    keys: NDArray[np.uint64]
    first: NDArray[np.int64]
    last_entry: NDArray[np.int64]
    last: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The entries of a group: where those of each part begin, and their number. int64 ``[num_parts]``."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive blocks: the number of the first one, and how many; the first example and entry."""

    block: int
    num_blocks: int
    position: int
    entry: int


def groups_for(num_ids: int, max_entries: int) -> int:
    """Groups of a table with so many ids, a power of two: on average one fills at most half of the memory of a sort.

    Groups that the processor's cache holds are sorted faster, as long as there are few.
    """
    fitting, cached = (1 << max(0, -(-2 * num_ids // most) - 1).bit_length() for most in (max_entries, _CACHED_ENTRIES))
    return min(MOST_GROUPS, max(fitting, min(cached, _FEW_GROUPS)))


class NextUseSort:
    """Distances between the uses of rows of several tables. Use it inside its `with` block, which removes the files.

    Args:
        num_groups: by table, powers of two; see `groups_for`.
        max_entries: most entries sorted at a time, by all threads together.
        threads: parts that are written, and groups that are sorted, at a time.
        folder: existing folder of the temporary files: 16 B per id.
    """

    def __init__(self, num_groups: Sequence[int], *, max_entries: int, threads: int, folder: Path) -> None:
        self._bits = [groups.bit_length() - 1 for groups in num_groups]
        self._first_group = np.concatenate([[0], np.cumsum(num_groups)]).tolist()
        self._max_entries = max(1, max_entries // threads)
        # A run of parts can be half of the memory, see `_runs`.
        self._part_entries = min(self._max_entries // 2, _PIECE_ENTRIES * self._first_group[-1])
        self._threads = threads
        self._keys = SpillFile(folder, np.uint64)
        self._examples = SpillFile(folder, np.uint32)  # the example of each entry in its part
        self._distances = SpillFile(folder, np.uint32)
        self._bounds = SpillFile(folder, np.int64)  # by part: first entry of each group, and the end of the last one
        self._block_starts = SpillFile(folder, np.int64)  # by block: where in each group's piece of the part it begins
        self._parts: list[_Part] = []
        self._part_of: list[int] = []  # by block
        self._held: list[tuple[TableUses, int]] = []  # blocks of the next part, and their examples
        self._num_entries = self._num_examples = 0
        self._writing: list[Future[None]] = []
        self._distances_of_part = lru_cache(threads)(self._read_part)
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for file in (self._keys, self._examples, self._distances, self._bounds, self._block_starts):
                opened.enter_context(file)
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="next-use")
            opened.callback(self._pool.shutdown, cancel_futures=True)
            opened.callback(self._distances_of_part.cache_clear)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, tables: TableUses, num_examples: int) -> None:
        """Add the next block.

        Args:
            tables: of the block.
            num_examples: examples of the block.
        """
        held = sum(ids.shape[0] for block, _ in self._held for ids, _ in block)
        if held and held + sum(ids.shape[0] for ids, _ in tables) > self._part_entries:
            self._flush()
        self._held.append((tables, num_examples))

    def solve(self, *, cyclic: bool) -> None:
        """Find all distances.

        Args:
            cyclic: after the last block the first one follows again; else the last use of a row is `FAR`.
        """
        if self._held:
            self._flush()
        for write in self._writing:
            write.result()
        self._writing.clear()
        num_groups = self._first_group[-1]
        step = max(1, TABLE_BYTES // (24 * max(1, len(self._parts))))
        for first in range(0, num_groups, step):
            groups = self._groups(range(first, min(first + step, num_groups)))
            for _ in self._pool.map(lambda group: self._solve_group(group, cyclic), groups):
                pass

    def distances(self, block: int, tables: TableUses) -> list[NDArray[np.uint32]]:
        """By table, uint32: the distance in examples from each id to the next use of its row, at most `FAR`.

        It is 0 where another occurrence in the same example follows.

        Args:
            block: its number, from 0.
            tables: as given to `add`.
        """
        part = self._parts[self._part_of[block]]
        at = part.entry
        starts: list[NDArray[np.int64]] = []
        if part.num_blocks > 1:
            num_groups = self._first_group[-1]
            bounds = self._bounds.read(self._part_of[block] * (num_groups + 1), num_groups)
            starts = np.split(bounds + self._block_starts.read(block * num_groups, num_groups), self._first_group[1:-1])
        found = []
        for number, (bits, (ids, _)) in enumerate(zip(self._bits, tables, strict=True)):
            _, groups, order = _grouped(ids, bits)
            if part.num_blocks == 1:
                in_groups = self._distances.read(at, ids.shape[0])
                at += ids.shape[0]
            else:
                counts = _counts(groups, ids.shape[0], bits)
                first = starts[number] - part.entry - (np.cumsum(counts) - counts)
                places = np.repeat(first, counts) + np.arange(ids.shape[0])
                in_groups = self._distances_of_part(self._part_of[block]).take(places)
            if order is None:
                found.append(in_groups)
            else:
                found.append(np.empty_like(in_groups))
                found[-1][order] = in_groups
        return found

    def _read_part(self, number: int) -> NDArray[np.uint32]:
        stop = self._parts[number + 1].entry if number + 1 < len(self._parts) else self._num_entries
        entry = self._parts[number].entry
        return self._distances.read(entry, stop - entry)

    def _flush(self) -> None:
        """Write the blocks that are held as a part, in a thread. At most so many parts as threads are written."""
        part = _Part(len(self._part_of), len(self._held), self._num_examples, self._num_entries)
        number, held = len(self._parts), self._held
        self._parts.append(part)
        self._part_of += [number] * len(held)
        self._num_entries += sum(ids.shape[0] for block, _ in held for ids, _ in block)
        self._num_examples += sum(count for _, count in held)
        self._held = []
        if len(self._writing) == self._threads:
            self._writing.pop(0).result()
        self._writing.append(self._pool.submit(self._write_part, number, part, held))

    def _write_part(self, number: int, part: _Part, held: list[tuple[TableUses, int]]) -> None:
        first_examples = np.cumsum([0, *(count for _, count in held)], dtype=np.uint32)
        counts: list[NDArray[np.int64]] = []  # by table
        block_starts: list[NDArray[np.int64]] = []  # by table: [num_blocks, groups]
        at = part.entry
        for table, bits in enumerate(self._bits):
            ids, examples = held[0][0][table]
            sizes = [block[table][0].shape[0] for block, _ in held]
            if len(held) > 1:
                ids = np.concatenate([block[table][0] for block, _ in held])
                examples = np.concatenate(
                    [block[table][1] + first for (block, _), first in zip(held, first_examples, strict=False)]
                )
            keys, groups, order = _grouped(ids, bits)
            if order is not None:
                keys, examples = keys.take(order), examples.take(order)
            self._keys.write(at, keys)
            self._examples.write(at, examples)
            at += ids.shape[0]
            ends = np.cumsum([0, *sizes]).tolist()
            by_block = np.array([_counts(groups[low:high], high - low, bits) for low, high in pairwise(ends)])
            counts.append(by_block.sum(axis=0))
            block_starts.append(np.cumsum(by_block, axis=0) - by_block)
        bounds = np.cumsum(np.concatenate([[part.entry], *counts]))
        self._bounds.write(number * bounds.shape[0], bounds)
        if len(held) > 1:
            self._block_starts.write(part.block * (bounds.shape[0] - 1), np.concatenate(block_starts, axis=1).ravel())

    def _groups(self, numbers: range) -> list[_Group]:
        """The entries of some consecutive groups."""
        row = self._first_group[-1] + 1
        bounds = np.empty((len(self._parts), len(numbers) + 1), dtype=np.int64)
        for part in range(len(self._parts)):
            bounds[part] = self._bounds.read(part * row + numbers.start, len(numbers) + 1)
        return [_Group(bounds[:, n].copy(), bounds[:, n + 1] - bounds[:, n]) for n in range(len(numbers))]

    def _solve_group(self, group: _Group, cyclic: bool) -> None:
        first_entries = np.concatenate([[0], np.cumsum(group.counts)])
        empty = np.empty(0, dtype=np.int64)
        carried = _Carried(empty.view(np.uint64), empty, empty, empty)
        runs = list(self._runs(group.counts))
        held: NDArray[np.uint32] | None = None
        for parts in runs:
            held, carried = self._solve_run(parts, group, int(first_entries[parts.start]), carried)
            if len(runs) > 1:
                self._write_run(parts, group, held)
        # The last use of each row: its distance leads over the end of the log.
        lead = carried.first + self._num_examples - carried.last if cyclic else np.full(carried.last.shape, FAR)
        order = np.argsort(carried.last_entry)
        entries, lead = carried.last_entry.take(order), np.minimum(lead.take(order), FAR).astype(np.uint32)
        for parts in runs:
            low, high = int(first_entries[parts.start]), int(first_entries[parts.stop])
            own = slice(*np.searchsorted(entries, [low, high]).tolist())
            if len(runs) > 1:
                held = _read_run(self._distances, parts, group, np.empty(high - low, dtype=np.uint32))
            assert held is not None, "a group has a run"
            held[entries[own] - low] = lead[own]
            self._write_run(parts, group, held)

    def _runs(self, counts: NDArray[np.int64]) -> Iterator[range]:
        """Consecutive parts that are sorted at a time, the last ones first. Of several, each takes half of the memory,
        what is carried the rest.
        """
        stop, held = counts.shape[0], 0
        most = self._max_entries if int(counts.sum()) <= self._max_entries else max(1, self._max_entries // 2)
        for part in range(stop - 1, -1, -1):
            if held and held + int(counts[part]) > most:
                yield range(part + 1, stop)
                stop, held = part + 1, 0
            held += int(counts[part])
        yield range(stop)

    def _solve_run(
        self, parts: range, group: _Group, first_entry: int, carried: _Carried
    ) -> tuple[NDArray[np.uint32], _Carried]:
        """Distances of the entries of a run, and what to carry to the parts before it."""
        counts = group.counts[parts.start : parts.stop]
        own = int(counts.sum())
        keys = _read_run(self._keys, parts, group, np.empty(own, dtype=np.uint64))
        examples = _read_run(self._examples, parts, group, np.empty(own, dtype=np.uint32))
        positions = np.repeat([self._parts[part].position for part in parts], counts)
        positions += examples
        del examples
        if carried.keys.shape[0]:
            keys, positions = np.concatenate([keys, carried.keys]), np.concatenate([positions, carried.first])
        order, same = _sorted(keys)
        at = positions.take(order)
        distances = np.zeros(order.shape[0], dtype=np.uint32)
        distances[order[:-1]] = np.minimum(at[1:] - at[:-1], FAR)  # of last uses any number, replaced later
        firsts = np.flatnonzero(np.concatenate([[True], ~same])) if order.shape[0] else np.empty(0, dtype=np.int64)
        lasts = np.append(firsts[1:] - 1, order.shape[0] - 1) if order.shape[0] else firsts
        last_entry, last = order.take(lasts), at.take(lasts)
        was_carried = np.flatnonzero(last_entry >= own)
        earlier = last_entry.take(was_carried) - own
        last_entry += first_entry
        last_entry[was_carried], last[was_carried] = carried.last_entry.take(earlier), carried.last.take(earlier)
        found = _Carried(keys.take(order.take(firsts)), at.take(firsts), last_entry, last)
        return distances[:own], found

    def _write_run(self, parts: range, group: _Group, entries: NDArray[np.uint32]) -> None:
        at = 0
        for part in parts:
            stop = at + int(group.counts[part])
            self._distances.write(int(group.starts[part]), entries[at:stop])
            at = stop


def _read_run(file: SpillFile[_Word], parts: range, group: _Group, entries: NDArray[_Word]) -> NDArray[_Word]:
    """Fill `entries` with those of a group in some parts."""
    at = 0
    for part in parts:
        stop = at + int(group.counts[part])
        file.read_into(int(group.starts[part]), entries[at:stop])
        at = stop
    return entries


def _grouped(
    ids: NDArray[np.int64], bits: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint16], NDArray[np.int64] | None]:
    """Hashes of ids, their groups, and the order by group; None: there is one group."""
    keys = ids.view(np.uint64) * _SPREAD
    if not bits:
        return keys, np.empty(0, dtype=np.uint16), None
    groups = (keys >> np.uint64(64 - bits)).astype(np.uint16)
    return keys, groups, np.argsort(groups, kind="stable")  # of 16 bits: a radix sort


def _counts(groups: NDArray[np.uint16], num_ids: int, bits: int) -> NDArray[np.int64]:
    """int64: ids in each group. `groups` as `_grouped` gives them."""
    return np.bincount(groups, minlength=1 << bits) if bits else np.array([num_ids], dtype=np.int64)


def _sorted(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Order by (id, place), and bool: each id is the same as the next one.

    A radix sort: a stable sort of 16 bits at a time, from the lowest, for as many bits as the ids have. It takes 14 to
    25 ns per entry and pass, a sort of 64-bit words 60 to 80.
    """
    ids = keys * _GATHER
    width = int(ids.max(initial=0)).bit_length()
    if width <= 32:
        ids = ids.astype(np.uint32)
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    for shift in range(16, width, 16):
        digits = (ids >> ids.dtype.type(shift)).astype(np.uint16)
        order = order.take(np.argsort(digits.take(order), kind="stable"))
    in_order = ids.take(order)
    return order, in_order[1:] == in_order[:-1]
