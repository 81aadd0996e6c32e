from __future__ import annotations

import numpy as np

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.plan import NO_BATCH, OracleSpec
from bagpipe.oracle.resident_set import Residents, SlotState

NOTHING = np.empty(0, dtype=np.int64)


def residents_of(num_slots: int, lookahead: int = 8) -> tuple[Residents, SlotState]:
    table = SlotState.empty(num_slots)
    return Residents(OracleSpec(table_rows=(), features=(), num_slots=num_slots, lookahead=lookahead), table), table


def fill(residents: Residents, table: SlotState, next_use: list[int]) -> list[int]:
    """Rows enter for a batch, with these next uses; their slots."""
    slots = residents.take(len(next_use))
    table.handle[slots] = slots
    table.next_use[slots] = next_use
    residents.use(slots, np.array(next_use, dtype=np.int32))
    return slots.tolist()


def test_free_slots_are_used_before_anything_leaves() -> None:
    residents, table = residents_of(3)
    victims, evict_after = residents.make_room(2, 0, NOTHING)
    assert (victims.tolist(), evict_after) == ([], NO_BATCH)
    assert fill(residents, table, [NEVER, 3]) == [0, 1]
    assert (residents.num_resident, residents.num_slots_used) == (2, 2)
    assert residents.make_room(1, 1, NOTHING)[0].tolist() == []


def test_the_row_needed_last_leaves_and_its_slot_is_free() -> None:
    residents, table = residents_of(3)
    residents.make_room(3, 0, NOTHING)
    slots = fill(residents, table, [4, NEVER, 5])
    residents.make_room(0, 1, NOTHING)
    residents.use(NOTHING, np.empty(0, dtype=np.int32))
    victims, evict_after = residents.make_room(1, 2, NOTHING)
    assert (victims.tolist(), evict_after) == ([slots[1]], 0)
    residents.release(victims)
    assert residents.take(1).tolist() == victims.tolist()


def test_an_idle_row_that_is_expected_again_is_no_longer_idle() -> None:
    residents, table = residents_of(2)
    residents.make_room(2, 0, NOTHING)
    idle, soon = fill(residents, table, [NEVER, NEVER])
    residents.make_room(0, 1, NOTHING)
    residents.use(NOTHING, np.empty(0, dtype=np.int32))
    table.next_use[soon] = 5
    residents.expect(np.array([soon]), 5)
    assert residents.make_room(1, 2, NOTHING)[0].tolist() == [idle]


def test_rows_of_this_batch_never_leave_and_for_one_of_the_batch_before_its_update_is_awaited() -> None:
    residents, table = residents_of(3)
    residents.make_room(2, 0, NOTHING)
    first, second = fill(residents, table, [1, 2])
    residents.make_room(1, 1, np.array([first]))
    before = residents.take(1)
    table.handle[before] = 9
    table.next_use[before] = 7
    residents.use(np.array([first, *before]), np.array([2, 7], dtype=np.int32))
    victims, evict_after = residents.make_room(1, 2, np.array([-4, first, second, 8]))
    assert (victims.tolist(), evict_after) == (before.tolist(), 1)
