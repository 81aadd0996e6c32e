"""`NextUseSort`: the distance from every use of a row to its next one, by an external sort in bounded memory.

    add(ids of a part) ──hash──> keys and positions on disk, part by part, within a part by group of rows
    solve()            group by group, backwards: sort (key, occurrence) ──> distance to the next use ──> disk
    distances(part)    read back in the order of `add`

A *part* is a run of consecutive examples, one block of the data. A *group* is the rows of one table with the same first
bits of their hash, so all uses of a row are in one group. A group that does not fit memory because a few rows have most
uses is sorted in runs of parts, from the last to the first; what is carried along is one entry per distinct row.

The hash is one to one: ids are found again from their keys, and distances are exact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTRY_BYTES", "FAR", "NextUseSort", "groups_for"]

_Word = TypeVar("_Word", np.uint32, np.uint64)

#: A distance of at least so many examples, or no next use.
FAR = (1 << 32) - 1

#: An odd number near 2**64 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): multiplying by
#: it maps 64-bit ids one to one, and spreads those that differ in low bits over the high bits.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
#: Its inverse modulo 2**64.
_GATHER = np.uint64(pow(int(_SPREAD), -1, 1 << 64))
#: Memory of a sort, in bytes per entry: keys, positions, words and what is made of them.
ENTRY_BYTES = 96


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """Distinct rows of later parts: key, first position there, and entry and position of the last use in the group."""

    keys: NDArray[np.uint64]
    first: NDArray[np.int64]
    last_entry: NDArray[np.int64]
    last: NDArray[np.int64]


def groups_for(num_ids: int, max_entries: int) -> int:
    """Groups of a table with so many ids, a power of two: on average a group fills half of the memory of a sort."""
    return 1 << max(0, -(-2 * num_ids // max_entries) - 1).bit_length()


class NextUseSort:
    """Distances between the uses of rows of several tables. Use it inside its `with` block, which removes the files.

    Args:
        num_groups: by table, powers of two; see `groups_for`.
        max_entries: most entries sorted at a time, by all threads together.
        threads: groups sorted at a time.
        folder: existing folder of the temporary files: 16 B per id.
    """

    def __init__(self, num_groups: Sequence[int], *, max_entries: int, threads: int, folder: Path) -> None:
        self._bits = [groups.bit_length() - 1 for groups in num_groups]
        self._first_group = np.concatenate([[0], np.cumsum(num_groups)]).tolist()
        self._max_entries = max(1, max_entries // threads)
        self._threads = threads
        self._folder = folder
        self._files: list[int] = []
        self._ends = [np.zeros(1, dtype=np.int64)]  # by part: where its groups end among all entries
        self._positions = [0]  # by part: position of its first example; then the number of examples
        self._places = np.zeros((2, 0, 0), dtype=np.int64)

    def __enter__(self) -> Self:
        for number in range(3):  # keys, examples within the part, distances
            path = os.path.join(self._folder, f"next-use-{number}")
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(path)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def add(self, tables: Sequence[tuple[NDArray[np.int64], NDArray[np.uint32]]], num_examples: int) -> None:
        """Add the next part.

        Args:
            tables: by table, ids and the example of each within the part, ascending.
            num_examples: examples of the part.
        """
        counts: list[NDArray[np.int64]] = []
        at = int(self._ends[-1][-1])
        for bits, (ids, examples) in zip(self._bits, tables, strict=True):
            keys, groups, order = _grouped(ids, bits)
            if order is not None:
                keys, examples = keys.take(order), examples.take(order)
            _write(self._files[0], keys, at * 8)
            _write(self._files[1], examples, at * 4)
            at += ids.shape[0]
            counts.append(np.bincount(groups, minlength=1 << bits) if bits else np.array([ids.shape[0]]))
        self._ends.append(int(self._ends[-1][-1]) + np.cumsum(np.concatenate(counts)))
        self._positions.append(self._positions[-1] + num_examples)

    def solve(self, *, cyclic: bool) -> None:
        """Find all distances.

        Args:
            cyclic: after the last part the first one follows again; else the last use of a row is `FAR`.
        """
        starts = [np.concatenate([before[-1:], ends[:-1]]) for before, ends in pairwise(self._ends)]
        num_groups = self._first_group[-1]
        self._places = np.array([starts, self._ends[1:]], dtype=np.int64).reshape((2, len(starts), num_groups))
        os.ftruncate(self._files[2], int(self._ends[-1][-1]) * 4)
        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(lambda group: self._solve_group(group, cyclic), range(num_groups)):
                pass

    def distances(
        self, part: int, tables: Sequence[tuple[NDArray[np.int64], NDArray[np.uint32]]]
    ) -> list[NDArray[np.uint32]]:
        """By table, uint32: the distance in examples from each id to the next use of its row, at most `FAR`.

        It is 0 where another occurrence in the same example follows.

        Args:
            part: number of the part, from 0.
            tables: as given to `add`.
        """
        at = int(self._ends[part][-1])
        found = []
        for bits, (ids, _) in zip(self._bits, tables, strict=True):
            sorted_distances = _read(self._files[2], np.empty(ids.shape[0], dtype=np.uint32), at * 4)
            at += ids.shape[0]
            _, _, order = _grouped(ids, bits)
            if order is None:
                found.append(sorted_distances)
            else:
                found.append(np.empty_like(sorted_distances))
                found[-1][order] = sorted_distances
        return found

    def _solve_group(self, group: int, cyclic: bool) -> None:
        starts, stops = self._places[0, :, group], self._places[1, :, group]
        counts = stops - starts
        first_entries = np.concatenate([[0], np.cumsum(counts)])
        empty = np.empty(0, dtype=np.int64)
        carried = _Carried(empty.view(np.uint64), empty, empty, empty)
        runs = list(self._runs(counts))
        held: NDArray[np.uint32] | None = None
        for parts in runs:
            held, carried = self._solve_run(parts, counts, starts, int(first_entries[parts.start]), carried)
            if len(runs) > 1:
                self._write_run(parts, counts, starts, held)
        # The last use of each row: its distance leads over the end of the log.
        lead = carried.first + self._positions[-1] - carried.last if cyclic else np.full(carried.last.shape, FAR)
        order = np.argsort(carried.last_entry)
        entries, lead = carried.last_entry.take(order), np.minimum(lead.take(order), FAR).astype(np.uint32)
        for parts in runs:
            low, high = int(first_entries[parts.start]), int(first_entries[parts.stop])
            own = slice(*np.searchsorted(entries, [low, high]).tolist())
            if len(runs) > 1:
                held = self._read_run(self._files[2], parts, counts, starts, np.uint32)
            assert held is not None, "a group has a run"
            held[entries[own] - low] = lead[own]
            self._write_run(parts, counts, starts, held)

    def _runs(self, counts: NDArray[np.int64]) -> Iterator[range]:
        """Consecutive parts that are sorted at a time, the last ones first."""
        stop, held = counts.shape[0], 0
        for part in range(stop - 1, -1, -1):
            if held and held + int(counts[part]) > self._max_entries:
                yield range(part + 1, stop)
                stop, held = part + 1, 0
            held += int(counts[part])
        yield range(stop)

    def _solve_run(
        self,
        parts: range,
        counts: NDArray[np.int64],
        starts: NDArray[np.int64],
        first_entry: int,
        carried: _Carried,
    ) -> tuple[NDArray[np.uint32], _Carried]:
        """Distances of the entries of a run, and what to carry to the parts before it."""
        keys = self._read_run(self._files[0], parts, counts, starts, np.uint64)
        positions = self._read_run(self._files[1], parts, counts, starts, np.uint32).astype(np.int64)
        positions += np.repeat(np.array(self._positions)[parts.start : parts.stop], counts[parts.start : parts.stop])
        own = keys.shape[0]
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

    def _read_run(
        self, file: int, parts: range, counts: NDArray[np.int64], starts: NDArray[np.int64], dtype: type[_Word]
    ) -> NDArray[_Word]:
        entries = np.empty(int(counts[parts.start : parts.stop].sum()), dtype=dtype)
        at = 0
        for part in parts:
            stop = at + int(counts[part])
            _read(file, entries[at:stop], int(starts[part]) * entries.itemsize)
            at = stop
        return entries

    def _write_run(
        self, parts: range, counts: NDArray[np.int64], starts: NDArray[np.int64], entries: NDArray[np.uint32]
    ) -> None:
        at = 0
        for part in parts:
            stop = at + int(counts[part])
            _write(self._files[2], entries[at:stop], int(starts[part]) * entries.itemsize)
            at = stop


def _grouped(
    ids: NDArray[np.int64], bits: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint16], NDArray[np.int64] | None]:
    """Hashes of ids, their groups, and the order by group; None: there is one group."""
    keys = ids.view(np.uint64) * _SPREAD
    if not bits:
        return keys, np.empty(0, dtype=np.uint16), None
    groups = (keys >> np.uint64(64 - bits)).astype(np.uint16)
    return keys, groups, np.argsort(groups, kind="stable")  # of 16 bits: a radix sort


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


def _write(file: int, array: NDArray[_Word], offset: int) -> None:
    view = np.ascontiguousarray(array).view(np.uint8).data
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _read(file: int, array: NDArray[_Word], offset: int) -> NDArray[_Word]:
    view = array.view(np.uint8).data
    while view:
        done = os.preadv(file, [view], offset)
        if not done:
            raise OSError("a temporary file ends early")
        view, offset = view[done:], offset + done
    return array
