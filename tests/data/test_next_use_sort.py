from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import next_use_sort
from data.next_use_sort import ENTRY_BYTES, FAR, NextUseSort, groups_for

#: Parts of one table: (id, example) pairs in the order of the examples, and the number of examples.
IDS = st.integers(0, 5) | st.sampled_from([-1, -(2**63), 2**63 - 1, 2**31, 2**32, 2**32 + 1, 2**48])
PARTS = st.lists(
    st.integers(1, 5).flatmap(
        lambda count: st.tuples(st.lists(st.tuples(IDS, st.integers(0, count - 1)), max_size=12), st.just(count))
    ),
    min_size=1,
    max_size=5,
)


@given(PARTS, st.booleans(), st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 10, 1000]), st.sampled_from([1, 2]))
def test_distances_lead_to_the_next_example_with_the_row(
    parts: list[tuple[list[tuple[int, int]], int]], cyclic: bool, groups: int, max_entries: int, threads: int
) -> None:
    tables = []
    for pairs, _ in parts:
        pairs.sort(key=lambda pair: pair[1])
        ids, examples = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        tables.append((np.ascontiguousarray(ids), examples.astype(np.uint32)))
    # The second table is empty.
    nothing = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32))
    with (
        tempfile.TemporaryDirectory() as folder,
        NextUseSort([groups, 1], max_entries=max_entries, threads=threads, folder=Path(folder)) as sort,
    ):
        for table, (_, count) in zip(tables, parts, strict=True):
            sort.add([table, nothing], count)
        sort.solve(cyclic=cyclic)
        found = [sort.distances(number, [table, nothing])[0].tolist() for number, table in enumerate(tables)]
    assert found == distances(parts, cyclic)


def distances(parts: list[tuple[list[tuple[int, int]], int]], cyclic: bool) -> list[list[int]]:
    """By part: distances found by walking backwards, twice around if the log is cyclic."""
    starts = np.concatenate([[0], np.cumsum([count for _, count in parts])]).tolist()
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for lap in (1, 0) if cyclic else (0,):
        found = []
        for (pairs, _), start in zip(reversed(parts), reversed(starts[:-1]), strict=True):
            found.insert(0, [])
            for row, example in reversed(pairs):
                place = start + example + lap * starts[-1]
                found[0].insert(0, upcoming.get(row, place + FAR) - place)
                upcoming[row] = place
    return found


@pytest.mark.parametrize(("ids", "groups"), [(0, 1), (500, 1), (501, 2), (1_000, 2), (2_001, 8), (10**9, 1 << 16)])
def test_a_group_fills_at_most_half_of_the_memory(ids: int, groups: int) -> None:
    assert groups_for(ids, 1_000) == groups


def test_large_memory_makes_groups_that_a_cache_holds() -> None:
    assert [groups_for(ids, 10**9) for ids in (1 << 19, 1 << 20, 1 << 24, 1 << 28)] == [1, 2, 32, 64]


def test_memory_is_bounded_whatever_the_number_of_blocks_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_entries, block, num_blocks = 1_000, 50, 1_200
    monkeypatch.setattr(next_use_sort, "TABLE_BYTES", 4_096)
    groups = groups_for(block * num_blocks, max_entries)
    assert num_blocks * groups * 24 > 3e6  # of a table of all of them
    random = np.random.default_rng(0)
    examples = np.arange(block, dtype=np.uint32)
    with NextUseSort([groups], max_entries=max_entries, threads=1, folder=tmp_path) as sort:
        tracemalloc.start()
        try:
            for _ in range(num_blocks):
                sort.add([(random.integers(0, 1 << 40, block), examples)], block)
            sort.solve(cyclic=True)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # Beside the sort: the bounds of the groups, and some words for each block and part.
    assert peak_bytes < max_entries * ENTRY_BYTES + 4_096 + 300_000
