from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.oracle.plan import slots_of
from bagpipe.oracle.sizing import BYTES_PER_SLOT, MAX_SLOT_BYTES, Memory, most_rows
from bagpipe.oracle.spec_check import MAX_SLOTS

GIB = 1 << 30
MEMORIES = st.builds(
    Memory,
    name=st.just("m"),
    free_bytes=st.integers(0, 1 << 42),
    other_bytes=st.integers(0, 1 << 34),
    slot_bytes=st.integers(16, 4096),
    num_sharing=st.integers(1, 16),
)


@given(
    memories=st.lists(MEMORIES, max_size=2),
    table_rows=st.lists(st.none() | st.integers(0, 1 << 40), min_size=1, max_size=3),
    world_size=st.integers(1, 16),
    num_caches=st.integers(1, 2),
    max_rows=st.integers(0, 1 << 33),
)
def test_the_bound_keeps_every_limit(
    memories: list[Memory], table_rows: list[int | None], world_size: int, num_caches: int, max_rows: int
) -> None:
    try:
        rows = most_rows(
            memories, table_rows=table_rows, world_size=world_size, num_caches=num_caches, max_rows=max_rows
        )
    except InputError:
        assert not max_rows
        assert any(memory.num_slots // num_caches == 0 for memory in memories)
        return
    assert rows >= 1
    assert slots_of(rows) * world_size <= MAX_SLOTS
    assert slots_of(rows) * world_size * BYTES_PER_SLOT <= MAX_SLOT_BYTES
    if None not in table_rows:
        assert rows <= max(1, sum(count or 0 for count in table_rows))
    if max_rows:
        assert rows <= max_rows
        return
    for memory in memories:
        taken = slots_of(rows) * num_caches * memory.slot_bytes
        assert memory.num_sharing * (2 * taken + memory.other_bytes) <= memory.free_bytes


def test_half_of_the_memory_and_all_rows() -> None:
    memory = Memory(name="m", free_bytes=14 * GIB, slot_bytes=1024)
    assert slots_of(most_rows([memory], table_rows=[None])) == 7 << 20
    assert most_rows([memory], table_rows=[1000, 500]) == 1500
    assert most_rows([memory], table_rows=[None], max_rows=7) == 7


def test_a_memory_without_room_is_one_line() -> None:
    memory = Memory(name="cuda:0", free_bytes=1 << 20, other_bytes=GIB, slot_bytes=64)
    with pytest.raises(
        InputError, match=r"^cache\.rows auto: 1048576 bytes are free on cuda:0, .*set cache\.max_rows$"
    ):
        most_rows([memory], table_rows=[None])
