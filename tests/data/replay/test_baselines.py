from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.errors import CapacityError, InputError
from data.replay.baselines import BASELINES, Counts, run_baseline

NUM_ROWS = 7
logs = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=4, unique=True), max_size=9)
slots = st.integers(4, NUM_ROWS)


@st.composite
def mortal_logs(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """A log, and the live rows that expire before each batch."""
    log, alive, expired = draw(logs), set[int](), []
    for rows in log:
        expired.append(draw(st.lists(st.sampled_from(sorted(alive)), unique=True)) if alive else [])
        alive = (alive - set(expired[-1])) | set(rows)
    return log, expired


def as_arrays(log: list[list[int]]) -> list[NDArray[np.int32]]:
    return [np.array(rows, dtype=np.int32) for rows in log]


def run(policy: str, log: list[list[int]], num_slots: int, expired: list[list[int]] | None = None) -> Counts:
    with tempfile.TemporaryDirectory() as folder:
        return run_baseline(
            policy,
            as_arrays(log),
            num_rows=NUM_ROWS,
            num_slots=num_slots,
            folder=Path(folder),
            expired=None if expired is None else as_arrays(expired),
        )


def model(
    log: list[list[int]],
    num_slots: int,
    key: Callable[[int, int, int, int], object],
    expired: Sequence[Sequence[int]] = (),
) -> Counts:
    """A cache in plain Python. It evicts the least `key` of (uses while resident, last use, place in batch, row)."""
    uses: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}
    misses = peak = dropped = 0
    for number, (rows, gone) in enumerate(itertools.zip_longest(log, expired, fillvalue=())):
        dropped += len(uses.keys() & gone)
        uses = {row: count for row, count in uses.items() if row not in gone}
        new = [row for row in rows if row not in uses]
        others = sorted(
            (row for row in uses if row not in rows),
            key=lambda row: key(uses[row], *last[row], row),  # type: ignore[arg-type, return-value]
        )
        for row in others[: max(0, len(uses) + len(new) - num_slots)]:
            del uses[row]
        for place, row in enumerate(rows):
            uses[row] = uses.get(row, 0) + 1
            last[row] = number, place
        misses += len(new)
        peak = max(peak, len(uses))
    return Counts(rows_unique=sum(map(len, log)), misses=misses, peak_rows=peak, dropped=dropped)


@given(mortal_logs(), slots)
def test_lru_equals_a_plain_cache(log: tuple[list[list[int]], list[list[int]]], num_slots: int) -> None:
    batches, expired = log
    found = model(batches, num_slots, lambda uses, last, place, row: (last, place), expired)
    assert run("lru", batches, num_slots, expired) == found


@given(mortal_logs(), slots)
def test_lfu_counts_uses_since_the_row_entered_and_breaks_ties_by_recency(
    log: tuple[list[list[int]], list[list[int]]], num_slots: int
) -> None:
    batches, expired = log
    found = model(batches, num_slots, lambda uses, last, place, row: (uses, last, place), expired)
    assert run("lfu", batches, num_slots, expired) == found


def fewest_misses(log: list[list[int]], num_slots: int, expired: list[list[int]]) -> int:
    """Minimum over all choices of rows kept after each batch; only full caches, since more rows never hurt."""
    best = {frozenset[int](): 0}
    for rows, gone in zip(log, expired, strict=True):
        after: dict[frozenset[int], int] = {}
        for before, misses in best.items():
            cache = before - set(gone)
            new = misses + len(set(rows) - cache)
            idle = sorted(cache - set(rows))
            for kept in itertools.combinations(idle, min(len(idle), num_slots - len(rows))):
                cache_after = frozenset(kept) | frozenset(rows)
                after[cache_after] = min(new, after.get(cache_after, new))
        best = after
    return min(best.values())


@given(mortal_logs(), slots)
def test_offline_belady_is_optimal(log: tuple[list[list[int]], list[list[int]]], num_slots: int) -> None:
    batches, expired = log
    assert run("offline-belady", batches, num_slots, expired).misses == fewest_misses(batches, num_slots, expired)


@given(mortal_logs(), slots)
def test_rows_that_expire_leave_the_hot_ones_too(log: tuple[list[list[int]], list[list[int]]], num_slots: int) -> None:
    """Each row that enters is written when it leaves or at the end, unless it expires."""
    batches, expired = log
    uses = [sum(row in rows for rows in batches) for row in range(NUM_ROWS)]
    immortal, found = run("static-hot", batches, num_slots), run("static-hot", batches, num_slots, expired)
    assert immortal.dropped == 0
    assert immortal.misses <= found.misses <= immortal.misses + found.dropped
    assert found.peak_rows <= immortal.peak_rows
    assert found.dropped <= sum(uses[row] > 0 for gone in expired for row in gone)


@given(logs, slots)
def test_static_hot_pins_the_most_used_rows_that_fit(log: list[list[int]], num_slots: int) -> None:
    uses = [sum(row in rows for rows in log) for row in range(NUM_ROWS)]
    by_use = sorted(range(NUM_ROWS), key=lambda row: (-uses[row], row))
    hot = max(
        (set(by_use[:count]) for count in range(num_slots + 1)),
        key=lambda hot: len(hot) if all(len(hot | set(rows)) <= num_slots for rows in log) else -1,
    )
    counts = run("static-hot", log, num_slots)
    assert counts.misses == sum(len(set(rows) - hot) for rows in log) + len(hot & set(itertools.chain(*log)))
    assert counts.peak_rows <= num_slots


@settings(max_examples=50, deadline=None)
@given(logs, slots, st.sampled_from(sorted(BASELINES)))
def test_invariants_of_every_policy(log: list[list[int]], num_slots: int, policy: str) -> None:
    counts = run(policy, log, num_slots)
    assert counts.rows_unique == sum(map(len, log))
    assert len(set(itertools.chain(*log))) <= counts.misses <= counts.rows_unique
    assert max(map(len, log), default=0) <= counts.peak_rows <= num_slots
    assert counts.misses >= run("offline-belady", log, num_slots).misses


def test_a_long_log_leaves_few_entries_behind_and_ties_in_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    log = [np.unique(rng.zipf(1.3, 60) % 200).tolist() for _ in range(300)]
    for policy, key in (
        ("lru", lambda uses, last, place, row: (last, place)),
        ("lfu", lambda uses, last, place, row: (uses, last, place)),
    ):
        got = run_baseline(policy, as_arrays(log), num_rows=200, num_slots=64, folder=tmp_path)
        assert got == model(log, 64, key)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", sorted(BASELINES))
def test_a_batch_that_does_not_fit_gives_the_oracles_error(policy: str, tmp_path: Path) -> None:
    batches = as_arrays([[0], [1, 2, 3, 4, 5]])
    with pytest.raises(
        CapacityError, match=r"batch 1 needs 5 unique rows but cache\.rows is 4: raise cache\.rows to at least 5, or"
    ):
        run_baseline(policy, batches, num_rows=6, num_slots=4, folder=tmp_path)
    with pytest.raises(
        CapacityError,
        match=r"but cache\.rows is 2 on each of 2 ranks, 4 in all: raise cache\.rows to at least 3, or lower data\.",
    ):
        run_baseline(policy, batches, num_rows=6, num_slots=4, folder=tmp_path, world_size=2)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policy must be one of lfu, lru, offline-belady, static-hot, got 'fifo'"):
        run_baseline("fifo", [], num_rows=0, num_slots=1, folder=tmp_path)


@given(logs, slots, st.sampled_from(sorted(BASELINES)))
def test_misses_are_counted_by_group(log: list[list[int]], num_slots: int, policy: str) -> None:
    groups = [np.array(group, dtype=np.int16) for group in ([row % 3 for row in range(NUM_ROWS)], range(NUM_ROWS))]
    with tempfile.TemporaryDirectory() as folder:
        by_three, by_row = (
            run_baseline(
                policy,
                as_arrays(log),
                num_rows=NUM_ROWS,
                num_slots=num_slots,
                folder=Path(folder),
                group_of_row=group_of_row,
            )
            for group_of_row in groups
        )
    assert sum(by_row.misses_by_group) == by_row.misses == run(policy, log, num_slots).misses
    assert by_three.misses_by_group == tuple(sum(by_row.misses_by_group[start::3]) for start in range(3))
