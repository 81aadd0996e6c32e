from __future__ import annotations

import numpy as np

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.plan import NO_BATCH, OracleSpec
from bagpipe.oracle.resident_set import ResidentSet, SlotState

NOTHING = np.empty(0, dtype=np.int64)


def resident_set_of(num_slots: int, lookahead: int = 8) -> tuple[ResidentSet, SlotState]:
    state = SlotState.empty(num_slots)
    return ResidentSet(OracleSpec(table_rows=(), features=(), num_slots=num_slots, lookahead=lookahead), state), state


def fill(resident_set: ResidentSet, state: SlotState, next_use: list[int]) -> list[int]:
    """Insert rows for a batch, with these next uses. Returns their slots."""
    slots = resident_set.take(len(next_use))
    state.handle[slots] = slots
    state.next_use[slots] = next_use
    resident_set.use(slots, np.array(next_use, dtype=np.int32))
    return slots.tolist()


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
    resident_set.use(NOTHING, np.empty(0, dtype=np.int32))
    victims = resident_set.make_room(1, 2, NOTHING)
    assert (victims.slots.tolist(), victims.after, victims.num_waiting) == ([slots[1]], 0, 0)
    resident_set.release(victims.slots)
    assert resident_set.take(1).tolist() == victims.slots.tolist()


def test_an_idle_row_that_is_expected_again_is_no_longer_idle() -> None:
    resident_set, state = resident_set_of(2)
    resident_set.make_room(2, 0, NOTHING)
    idle, soon = fill(resident_set, state, [NEVER, NEVER])
    resident_set.make_room(0, 1, NOTHING)
    resident_set.use(NOTHING, np.empty(0, dtype=np.int32))
    state.next_use[soon] = 5
    resident_set.expect(np.array([soon]), 5)
    assert resident_set.make_room(1, 2, NOTHING).slots.tolist() == [idle]


def test_rows_of_this_batch_stay_and_evictions_from_the_previous_wait_for_its_update() -> None:
    resident_set, state = resident_set_of(3)
    resident_set.make_room(2, 0, NOTHING)
    first, second = fill(resident_set, state, [1, 2])
    resident_set.make_room(1, 1, np.array([first]))
    before = resident_set.take(1)
    state.handle[before] = 9
    state.next_use[before] = 7
    resident_set.use(np.array([first, *before]), np.array([2, 7], dtype=np.int32))
    victims = resident_set.make_room(1, 2, np.array([first, second]))
    assert (victims.slots.tolist(), victims.after, victims.num_waiting) == (before.tolist(), 1, 1)
