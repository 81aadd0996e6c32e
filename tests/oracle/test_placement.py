from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.placement import place_rows


def place(uses: list[list[int]], load: list[int], room: list[int]) -> list[int]:
    num_ranks = len(load)
    return place_rows(
        np.array(uses, dtype=np.uint8).reshape(-1, num_ranks),
        np.array(load, dtype=np.int64),
        np.array(room, dtype=np.int64),
    ).tolist()


def test_the_rank_with_most_uses() -> None:
    assert place([[1, 3], [2, 0], [0, 1]], load=[0, 9], room=[9, 9]) == [1, 0, 1]


def test_of_equals_the_rank_with_least_load_counting_those_placed_now() -> None:
    assert place([[1, 1, 0]], load=[5, 4, 0], room=[9, 9, 9]) == [1]
    spread = place([[1, 1]] * 100, load=[0, 0], room=[1000, 1000])
    assert sorted(np.bincount(spread)) == [50, 50]
    assert sorted(np.bincount(place([[1, 1]] * 100, load=[0, 60], room=[1000, 1000]))) == [25, 75]


def test_a_full_rank_spills_to_the_next_best_with_room() -> None:
    assert place([[9, 2, 1]] * 4, load=[0, 0, 0], room=[1, 2, 9]) == [0, 1, 1, 2]
    assert place([[9, 2, 1]], load=[0, 0, 0], room=[0, 0, 1]) == [2]
    assert place([], load=[0, 0], room=[0, 0]) == []


@given(st.data())
def test_no_rank_gets_more_than_its_room(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 5))
    uses = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks), max_size=30))
    counts = st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)
    load, room = data.draw(counts), data.draw(counts)
    room[0] += max(0, len(uses) - sum(room))
    owners = place(uses, load, room)
    taken = np.bincount(owners, minlength=num_ranks)
    assert (taken <= room).all()
    for row, owner in zip(uses, owners, strict=True):
        assert all(taken[rank] == room[rank] for rank in range(num_ranks) if row[rank] > row[owner])
