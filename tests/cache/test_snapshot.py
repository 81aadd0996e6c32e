"""`RowSnapshot`: a snapshot holds the rows as of `begin`, whatever lanes do afterwards."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.cache.slots import FREE, Slots, SlotTable
from bagpipe.cache.snapshot import CopiedRows, RowSnapshot
from bagpipe.oracle.plan import RowList
from bagpipe.pipeline.stream import NullStreams
from bagpipe.store.interface import WriteRequest

NUM_SLOTS, NUM_TABLES = 12, 3

Row = tuple[int, int]


class Toy:
    """Slots with rows of one number each; receives the snapshot."""

    def __init__(self) -> None:
        self.slots = SlotTable(NUM_SLOTS)
        self.values = np.zeros(NUM_SLOTS, np.int64)
        self.snapshot = RowSnapshot(self.slots, NUM_TABLES, 8, self.read_out, NullStreams())
        self.rows: dict[Row, int] = {}
        self.names: list[Row] = []
        self.next_id = 0

    def read_out(self, rows: RowList, slots: Slots) -> CopiedRows:
        values = self.values[slots]

        def requests() -> list[WriteRequest]:
            bounds = rows.table_offsets
            parts = [(table, slice(int(bounds[table]), int(bounds[table + 1]))) for table in range(NUM_TABLES)]
            return [WriteRequest(table, rows.ids[part], values[part]) for table, part in parts]

        return requests

    def take_rows(self, rows: CopiedRows, num_bytes: int) -> None:
        taken = {
            (request.table, int(row)): int(value)
            for request in rows()
            for row, value in zip(request.ids, request.rows, strict=True)
        }
        assert not taken.keys() & self.rows.keys(), "each once"
        assert num_bytes == 8 * len(taken)
        self.rows |= taken

    def take_names(self, tables: NDArray[np.int32], ids: NDArray[np.int64], stored_checks: NDArray[np.uint64]) -> None:
        assert (stored_checks == ids.astype(np.uint64)).all(), "those of the rows' slots"
        self.names += zip(tables.tolist(), ids.tolist(), strict=True)

    def insert(self, slot: int, table: int) -> None:
        rows = RowList(table_offsets=np.searchsorted([table], np.arange(NUM_TABLES + 1)), ids=np.array([self.next_id]))
        self.slots.claim(rows, np.array([slot]), np.array([self.next_id], np.uint64))
        self.values[slot] = -1
        self.next_id += 1

    def update(self, slots: NDArray[np.int64], value: int) -> None:
        self.snapshot.before_change(slots)
        self.values[slots] = value
        self.slots.mark_dirty(slots)

    def evict(self, slots: NDArray[np.int64]) -> None:
        with self.snapshot.lock:
            self.snapshot.before_release(slots)
            self.slots.release(slots)

    def resident(self, chosen: list[int]) -> NDArray[np.int64]:
        """Those of the slots that hold rows, by table."""
        slots = np.array(sorted({slot for slot in chosen if self.slots.slot_table[slot] != FREE}), np.int64)
        return slots[np.argsort(self.slots.slot_table[slots], kind="stable")]

    def state(self, *, changed: bool) -> dict[Row, int]:
        mask = self.slots.dirty & self.slots.changed if changed else self.slots.dirty
        return {
            (int(self.slots.slot_table[slot]), int(self.slots.slot_id[slot])): int(self.values[slot])
            for slot in np.flatnonzero(mask)
        }


SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=5)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["update", "evict", "insert", "drain", "grow", "snapshot"]), SLOTS, st.integers(0, 2)),
    max_size=80,
)


@given(ACTIONS)
def test_a_snapshot_does_not_change(actions: list[tuple[str, list[int], int]]) -> None:
    toy = Toy()
    expected_rows: dict[Row, int] = {}
    expected_names: set[Row] = set()

    def snapshot(receiver: Toy) -> None:
        nonlocal expected_rows, expected_names
        while toy.snapshot.num_left:
            toy.snapshot.drain(3)
        assert toy.rows == expected_rows
        assert sorted(toy.names) == sorted(expected_names)
        toy.rows, toy.names = {}, []
        expected_rows, expected_names = toy.state(changed=True), set(toy.state(changed=False))
        before = toy.snapshot.epoch
        assert toy.snapshot.begin(receiver) == 8 * len(expected_rows)
        assert toy.snapshot.epoch == before + 1

    for number, (action, chosen, table) in enumerate(actions):
        if action == "update":
            toy.update(toy.resident(chosen), number)
        elif action == "evict":
            toy.evict(toy.resident(chosen))
        elif action == "insert":
            for slot in set(chosen):
                if toy.slots.slot_table[slot] == FREE:
                    toy.insert(slot, table)
        elif action == "drain":
            toy.snapshot.drain(table + 1)
        elif action == "grow":
            toy.slots.grow(len(toy.slots) + table)
            toy.values = np.resize(toy.values, len(toy.slots))
        else:
            snapshot(toy)
    snapshot(toy)


def test_a_snapshot_without_a_receiver_only_counts() -> None:
    toy = Toy()
    toy.insert(3, 1)
    toy.update(np.array([3]), 5)
    assert (toy.snapshot.begin(None), toy.snapshot.epoch, toy.snapshot.num_left) == (0, 2, 0)
    toy.evict(np.array([3]))
    assert not toy.rows
