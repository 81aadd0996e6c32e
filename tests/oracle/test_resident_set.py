from __future__ import annotations

import numpy as np

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.plan import NO_BATCH, OracleSpec
from bagpipe.oracle.resident_set import ResidentSet, SlotState, UsedSlots


def spec_of(num_slots: int, lookahead: int = 8, world_size: int = 1) -> OracleSpec:
    return OracleSpec(table_rows=(), features=(), num_slots=num_slots, lookahead=lookahead, world_size=world_size)


def used(slots: list[int], next_use: list[int]) -> UsedSlots:
    return UsedSlots(np.array(slots, dtype=np.int64), np.array(next_use, dtype=np.int32), spec_of(1))


NOTHING = used([], [])


def resident_set_of(num_slots: int, lookahead: int = 8) -> tuple[ResidentSet, SlotState]:
    state = SlotState.empty(num_slots)
    return ResidentSet(spec_of(num_slots, lookahead), state), state


def fill(resident_set: ResidentSet, state: SlotState, next_use: list[int]) -> list[int]:
    """Insert rows for a batch, with these next uses. Returns their slots."""
    slots: list[int] = resident_set.take(len(next_use)).tolist()
    state.handle[slots] = slots
    state.next_use[slots] = next_use
    resident_set.use(used(slots, next_use))
    return slots


def test_free_slots_are_used_before_anything_leaves() -> None:
    resident_set, state = resident_set_of(3)
    victims = resident_set.make_room(2, 0, NOTHING)
    assert (victims.slots.tolist(), victims.after, victims.num_waiting) == ([], NO_BATCH, 0)
    assert fill(resident_set, state, [NEVER, 3]) == [0, 1]
    assert (resident_set.num_resident, resident_set.num_slots_used) == (2, 2)
    assert resident_set.make_room(1, 1, NOTHING).slots.tolist() == []


def test_the_row_needed_last_is_evicted() -> None:
    resident_set, state = resident_set_of(3)
    resident_set.make_room(3, 0, NOTHING)
    slots = fill(resident_set, state, [4, NEVER, 5])
    resident_set.make_room(0, 1, NOTHING)
    resident_set.use(NOTHING)
    victims = resident_set.make_room(1, 2, NOTHING)
    assert (victims.slots.tolist(), victims.after, victims.num_waiting) == ([slots[1]], 0, 0)
    resident_set.release(victims.slots)
    assert resident_set.take(1).tolist() == victims.slots.tolist()


def test_an_idle_row_that_is_expected_again_is_no_longer_idle() -> None:
    resident_set, state = resident_set_of(2)
    resident_set.make_room(2, 0, NOTHING)
    idle, soon = fill(resident_set, state, [NEVER, NEVER])
    resident_set.make_room(0, 1, NOTHING)
    resident_set.use(NOTHING)
    state.next_use[soon] = 5
    resident_set.expect(np.array([soon]), 5)
    assert resident_set.make_room(1, 2, NOTHING).slots.tolist() == [idle]


def test_rows_of_this_batch_stay_and_evictions_from_the_previous_wait_for_its_update() -> None:
    resident_set, state = resident_set_of(3)
    resident_set.make_room(2, 0, NOTHING)
    first, second = fill(resident_set, state, [1, 2])
    resident_set.make_room(1, 1, used([first], [1]))
    before = resident_set.take(1)
    state.handle[before] = 9
    state.next_use[before] = 7
    state.next_use[first] = 2
    resident_set.use(used([first, *before.tolist()], [2, 7]))
    victims = resident_set.make_room(1, 2, used([first, second], [2, 2]))
    assert (victims.slots.tolist(), victims.after, victims.num_waiting) == (before.tolist(), 1, 1)


def test_used_slots_are_split_by_rank_and_by_their_next_use() -> None:
    spec = spec_of(6, world_size=2)  # 7 slots of a rank, a spare one included
    slots = UsedSlots(np.array([13, 0, 7, 3]), np.array([2, 9, NEVER, 4], dtype=np.int32), spec)
    assert slots.counts.tolist() == [2, 2]
    assert [(own.slots.tolist(), own.next_use.tolist()) for own in slots.by_rank] == [
        ([0, 3], [9, 4]),
        ([6, 0], [2, NEVER]),
    ]
    assert [own.slots.tolist() for own in slots.beyond(4).by_rank] == [[0], [0]]
    assert slots.beyond(4) is slots.beyond(4)
    assert [own.slots.tolist() for own in slots.beyond(1).by_rank] == [[0, 3], [6, 0]]
