from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.plan import NO_BATCH, SPARE_PART, FeatureRef, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.planner import Planner, make_planner, plan_batches
from bagpipe.oracle.verify import Verifier, verify
from bagpipe.types.batch import Batch
from tests.oracle.batches import far_traces, make_batch, traces, with_next_uses
from tests.oracle.plan_bytes import as_bytes


def spec_of(num_slots: int, lookahead: int, policy: str = "belady-window") -> OracleSpec:
    return OracleSpec(
        table_rows=(None,),
        features=(FeatureRef(feature=0, table=0),),
        num_slots=num_slots,
        lookahead=lookahead,
        policy=policy,
    )


def one_id_a_batch(ids: str) -> list[Batch]:
    """One batch per letter: the id of the letter, one example."""
    return [make_batch(index, [[[ord(letter)]]]) for index, letter in enumerate(ids)]


def plans_of(ids: str, spec: OracleSpec) -> list[str]:
    """Each plan as text: ``+`` fetched rows, ``-`` evicted rows."""
    return [
        "".join(f"-{chr(i)}" for i in plan.owners[0].evict.ids)
        + "".join(f"+{chr(i)}" for i in plan.owners[0].fetch.ids)
        for _, plan in plan_batches(one_id_a_batch(ids), spec)
    ]


@given(traces())
def test_every_plan_of_every_trace_is_valid(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    assert verify(plan_batches(batches, spec), spec).num_batches == len(batches)


@given(far_traces())
def test_every_plan_is_valid_whatever_the_batches_tell_of_next_uses(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    assert verify(plan_batches(batches, spec), spec).num_batches == len(batches)


@given(st.lists(st.integers(0, 30), max_size=90), st.integers(1, 4), st.integers(SPARE_PART, 12))
def test_with_the_whole_log_no_more_rows_are_read_than_by_offline_belady(
    ids: list[int], lookahead: int, num_slots: int
) -> None:
    # A batch has one row and there is a spare slot, so no eviction waits.
    batches = [make_batch(index, [[[row]]]) for index, row in enumerate(ids)]
    spec = dataclasses.replace(spec_of(num_slots, lookahead), horizon="log")
    fetched = sum(len(plan.owners[0].fetch) for _, plan in plan_batches(with_next_uses(spec, batches), spec))
    assert fetched <= misses_of_belady(ids, num_slots)


def misses_of_belady(ids: list[int], num_slots: int) -> int:
    """Misses of the offline optimum for single rows."""
    resident: set[int] = set()
    misses = 0
    for now, row in enumerate(ids):
        if row not in resident:
            misses += 1
            if len(resident) == num_slots:
                rest = ids[now:]
                resident.remove(max(resident, key=lambda one: rest.index(one) if one in rest else len(ids)))
            resident.add(row)
    return misses


def test_rows_are_evicted_by_next_use_beyond_the_window() -> None:
    letters = "abcdefghabcdefgh"
    near, far = spec_of(6, 2), dataclasses.replace(spec_of(6, 2), horizon="log")
    batches = with_next_uses(far, one_id_a_batch(letters))
    fetched = [
        "".join(chr(i) for _, plan in plan_batches(batches, spec) for i in plan.owners[0].fetch.ids)
        for spec in (near, far)
    ]
    assert fetched == ["abcdefghabcdefgh", "abcdefghfg"]


def test_the_horizon_log_needs_batches_that_tell_next_uses() -> None:
    with pytest.raises(InputError, match="batch 0 does not tell the next uses"):
        list(plan_batches(one_id_a_batch("a"), dataclasses.replace(spec_of(3, 2), horizon="log")))


@pytest.mark.parametrize(
    ("horizon", "policy", "problem"),
    [("day", "belady-window", "oracle.horizon must be one of"), ("log", "drop-unused", "oracle.horizon log orders")],
)
def test_an_impossible_horizon_is_refused(horizon: str, policy: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make_planner(dataclasses.replace(spec_of(3, 2, policy), horizon=horizon))


@given(traces())
def test_a_cache_grows_before_rows_leave_that_the_window_uses(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    spec = dataclasses.replace(spec, num_slots=max(spec.num_slots, 1), grows=True)
    rows = [Planner(spec).num_unique(batch) for batch in batches]
    spec = dataclasses.replace(spec, num_slots=max([spec.num_slots, *(2 * count for count in rows)]))
    plans = [plan for _, plan in plan_batches(batches, spec)]
    assert verify(zip(batches, plans, strict=True), spec).num_batches == len(batches)
    for rank in range(spec.world_size):
        used = [plan.owners[rank].num_slots for plan in plans]
        assert used == sorted(used)
        assert max(used, default=0) <= spec.slots_per_rank
    # Up to its bound nothing waits, and no row comes back that the window could see when it left.
    left: dict[tuple[int, int], int] = {}
    for number, plan in enumerate(plans):
        for owner in plan.owners:
            if owner.num_slots + SPARE_PART >= spec.slots_per_rank:
                return
            assert not owner.evict_waiting
            for table, i in rows_of(owner.fetch):
                assert left.get((table, i), number - spec.lookahead) + spec.lookahead <= number
            left |= dict.fromkeys(rows_of(owner.evict), number)


@given(traces(), st.lists(st.integers(1, 4), max_size=14), st.booleans())
def test_plans_of_batches_that_arrive_late_are_valid(
    trace: tuple[OracleSpec, list[Batch]], arrivals: list[int], ends: bool
) -> None:
    """Whatever number of batches arrives between two plans: the window is planned with what there is."""
    spec, batches = trace
    planner, verifier, waiting = make_planner(spec), Verifier(spec), iter(batches)
    window: list[Batch] = []
    left = len(batches)
    for number in [*arrivals, *[len(batches)] * ends]:
        for batch in itertools.islice(waiting, number):
            planner.push(batch)
            window.append(batch)
            left -= 1
            if planner.is_ready:
                verifier.check(window.pop(0), planner.plan())
        while window:
            last_seen = window[-1].index if left or not ends else None
            verifier.check(window.pop(0), planner.plan(more_follow=last_seen is not None), last_seen=last_seen)
    if ends:
        verifier.finish()


def test_a_row_that_left_unseen_waits_for_its_write_back() -> None:
    """Batch 2 evicts row a, and its window does not show batch 3, which reads a again."""
    planner = make_planner(spec_of(1, lookahead=8))
    waits = []
    for batch in one_id_a_batch("abca"):
        planner.push(batch)
        waits.append(planner.plan(more_follow=True).owners[0].fetch_after)
    assert waits == [NO_BATCH, NO_BATCH, NO_BATCH, 2]


def rows_of(rows: RowList) -> list[tuple[int, int]]:
    tables = np.repeat(np.arange(len(rows.table_offsets) - 1), np.diff(rows.table_offsets))
    return list(zip(tables.tolist(), rows.ids.tolist(), strict=True))


def test_a_growing_cache_has_room_for_four_batches_then_for_the_window() -> None:
    """Rows that the window does not use leave once there are more than four batches; those that it uses stay."""
    spec = dataclasses.replace(spec_of(num_slots=1_000, lookahead=2), grows=True)
    assert plans_of("abcdef", spec) == ["+a", "+b", "+c", "+d", "-a+e", "-b+f"]
    spec = dataclasses.replace(spec, lookahead=64)
    assert plans_of("abcdefabcdef", spec)[6:] == ["", "", "", "", "", ""]
    assert plans_of("abcdefabcdef", dataclasses.replace(spec, num_slots=3)) == plans_of(
        "abcdefabcdef", dataclasses.replace(spec, num_slots=3, grows=False)
    )


@given(traces())
def test_plans_are_a_pure_function_of_the_batches(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    # Ids in new arrays, as a loader with other block boundaries would return.
    copies = [dataclasses.replace(batch, values=batch.values.copy()) for batch in batches]
    first = [as_bytes(plan) for _, plan in plan_batches(batches, spec)]
    assert first == [as_bytes(plan) for _, plan in plan_batches(iter(copies), spec)]


def test_evicts_the_row_needed_last() -> None:
    # With room for 3, d evicts the row of a, b, c whose next use is last: b.
    assert plans_of("abcdacb", spec_of(num_slots=3, lookahead=64)) == ["+a", "+b", "+c", "-b+d", "", "", "-d+b"]


def plan_after_filling(num_slots: int, last: str) -> OwnerPlan:
    """The plan of a batch that follows "c" and one new row "d". All rows are needed again, "c" last."""
    others = "".join(chr(0x100 + number) for number in range(num_slots - 1))
    ids = others + "c" + "d" + last + others + "c"
    plans = [plan for _, plan in plan_batches(one_id_a_batch(ids), spec_of(num_slots, lookahead=4 * num_slots))]
    return plans[num_slots + 1].owners[0]


def test_a_row_of_the_previous_batch_leaves_a_batch_later() -> None:
    """Its value is still changing: a spare slot holds the new row meanwhile, and no insert waits for the update."""
    owner = plan_after_filling(SPARE_PART, "e")
    assert ([chr(i) for i in owner.evict.ids], owner.evict_after) == (["c"], SPARE_PART - 1)


def test_a_leaving_row_that_is_used_stays() -> None:
    owner = plan_after_filling(SPARE_PART, "c")
    assert (len(owner.evict), len(owner.fetch)) == (0, 0), "d is leaving instead"


def test_without_a_spare_slot_an_earlier_row_leaves_instead() -> None:
    """c is needed last, but was used last: of a and b, neither of which d's batch uses, b is needed last."""
    plans = [plan.owners[0] for _, plan in plan_batches(one_id_a_batch("abcdabc"), spec_of(num_slots=3, lookahead=64))]
    assert ([chr(i) for i in plans[3].evict.ids], plans[3].evict_after, plans[3].evict_waiting) == (["b"], 1, 0)


def test_without_an_earlier_row_an_insert_waits_for_the_update() -> None:
    batches = [make_batch(index, [[[ord(letter) for letter in ids]]]) for index, ids in enumerate(["abc", "ade"])]
    plans = [plan.owners[0] for _, plan in plan_batches(batches, spec_of(num_slots=3, lookahead=64))]
    assert ([chr(i) for i in plans[1].evict.ids], plans[1].evict_after, plans[1].evict_waiting) == (["b", "c"], 0, 2)


def test_a_rank_whose_leaving_rows_are_all_used_takes_no_further_ones() -> None:
    """Its hits are more than its cache rows; the missing rows go to the other rank."""
    spec = dataclasses.replace(spec_of(num_slots=6, lookahead=1), world_size=2)
    examples: list[list[list[int]]] = [
        [[2, 7, 6, 9, 1, 8], []],
        [[6, 10], []],
        [[1, 6, 5, 2, 4, 9, 10, 3, 7, 8, 0], []],
    ]
    batches = [make_batch(index, [ids]) for index, ids in enumerate(examples)]
    assert verify(plan_batches(batches, spec), spec).num_batches == 3


def test_evicts_rows_of_the_previous_batch_last() -> None:
    plans = [plan for _, plan in plan_batches(one_id_a_batch("aba"), spec_of(num_slots=1, lookahead=8))]
    assert [plan.owners[0].evict_after for plan in plans] == [NO_BATCH, 0, 1]
    assert [plan.owners[0].fetch_after for plan in plans] == [NO_BATCH, NO_BATCH, 1]


def test_drop_unused_evicts_rows_outside_the_window() -> None:
    dropped = plans_of("abcdabcd", spec_of(num_slots=9, lookahead=2, policy="drop-unused"))
    assert dropped == ["+a", "+b", "-a+c", "-b+d", "-c+a", "-d+b", "-a+c", "-b+d"]
    assert plans_of("abcdabcd", spec_of(num_slots=9, lookahead=2))[4:] == ["", "", "", ""]


def test_idle_rows_leave_by_recency_and_frequent_ones_later() -> None:
    assert plans_of("abcd", spec_of(num_slots=3, lookahead=1))[3] == "-a+d"
    assert plans_of("aaabcd", spec_of(num_slots=3, lookahead=1))[5] == "-b+d"


@pytest.mark.parametrize("table_rows", [None, 1 << 10])
def test_a_returning_row_keeps_its_score(table_rows: int | None) -> None:
    spec = dataclasses.replace(spec_of(num_slots=3, lookahead=1), table_rows=(table_rows,))
    # With four earlier uses, a outlasts b, which was used five times but longer ago. The row p is always the latest.
    plans = plans_of("p".join("aaaabbbbbcaad"), spec)
    assert plans[18::2] == ["-a+c", "-c+a", "", "-b+d"]
    assert not any(plans[3::2])


def test_new_rows_are_marked_once() -> None:
    plans = [plan for _, plan in plan_batches(one_id_a_batch("abcabc"), spec_of(num_slots=1, lookahead=2))]
    assert [plan.owners[0].fetch_new.tolist() for plan in plans] == [[True], [True], [True], [False], [False], [False]]


def test_direct_mode_writes_everything_back_before_it_fetches() -> None:
    plans = [plan for _, plan in plan_batches(one_id_a_batch("aab"), spec_of(num_slots=0, lookahead=8))]
    assert [len(plan.owners[0].evict) for plan in plans] == [0, 1, 1]
    assert [(p.owners[0].evict_after, p.owners[0].fetch_after) for p in plans] == [(-1, 0), (0, 1), (1, 2)]


def test_a_batch_that_does_not_fit_is_refused_with_the_numbers() -> None:
    batch = make_batch(4, [[[1, 2, 3]]])
    with pytest.raises(CapacityError, match=r"batch 4 needs 3 unique rows but cache.rows is 2"):
        make_planner(spec_of(num_slots=2, lookahead=1)).push(batch)


def test_a_batch_that_does_not_fit_all_ranks_is_refused_with_the_numbers() -> None:
    spec = dataclasses.replace(spec_of(num_slots=2, lookahead=1), world_size=2)
    make_planner(spec).push(make_batch(0, [[[1, 2, 3, 4]]]))
    with pytest.raises(
        CapacityError, match=r"5 unique rows but cache.rows is 2 on each of 2 ranks, 4 in all.* least 3"
    ):
        make_planner(spec).push(make_batch(0, [[[1, 2, 3, 4, 5]]]))


def test_an_id_outside_its_table_is_refused() -> None:
    spec = OracleSpec(table_rows=(10,), features=(FeatureRef(feature=0, table=0),), num_slots=4, lookahead=1)
    for bad in (10, -1):
        with pytest.raises(InputError, match=rf"ids in \[0, 10\), got {bad}"):
            make_planner(spec).push(make_batch(0, [[[3, bad]]]))


def homes(ranks: int, batches: list[list[list[int]]], lookahead: int, num_slots: int = 99) -> list[dict[int, int]]:
    """Owner of each row, per batch; a batch is the ids of each example."""
    spec = dataclasses.replace(spec_of(num_slots=num_slots, lookahead=lookahead), world_size=ranks)
    planned = plan_batches([make_batch(index, [bags]) for index, bags in enumerate(batches)], spec)
    return [
        {
            int(row): int(owner)
            for consumer in plan.consumers
            for row, owner in zip(consumer.unique.ids, consumer.owners, strict=True)
        }
        for _, plan in planned
    ]


def test_the_owner_is_the_rank_with_most_uses_in_the_window() -> None:
    batches = [[[7], [7]], [[8], [7]], [[8], [7]], [[7], [8]], [[7], [8]], [[7], [8]]]
    # From batch 0: two uses by rank 0 within 4 batches, three by rank 1; all 6 batches have four by rank 0.
    assert homes(2, batches, lookahead=3)[0] == {7: 1}
    assert homes(2, batches, lookahead=64)[0] == {7: 0}
    # A row keeps its owner while it is resident.
    assert [owner[7] for owner in homes(2, batches, lookahead=3)] == [1] * 6


@pytest.mark.parametrize("lookahead", [255, 256, 300])
def test_uses_are_counted_exactly_however_long_the_window(lookahead: int) -> None:
    batches = [[[7], [7]], *([[8], [7]] for _ in range(254)), *([[7], [8]] for _ in range(254))]
    assert homes(2, batches, lookahead)[0] == {7: 1}


def test_rows_of_one_example_stay_at_its_rank_and_shared_ones_are_spread() -> None:
    alone = homes(4, [[[example] for example in range(8)]], lookahead=1)[0]
    assert alone == {example: example // 2 for example in range(8)}
    shared = homes(4, [[list(range(80))] * 4], lookahead=1)[0]
    assert np.bincount(list(shared.values())).tolist() == [20] * 4


def test_a_rank_without_room_leaves_rows_to_others() -> None:
    (owners,) = homes(2, [[[1, 2, 3], []]], lookahead=1, num_slots=2)
    assert sorted(owners.values()) == [0, 0, 1]


def test_pulls_and_pushes_of_a_small_example() -> None:
    spec = dataclasses.replace(spec_of(num_slots=9, lookahead=9), world_size=2)
    batches = [make_batch(index, [bags]) for index, bags in enumerate([[[1], [2]], [[1, 3], [1]], [[2], [3]]])]
    plans = [plan for _, plan in plan_batches(batches, spec)]
    assert [[e.pull_now.tolist() for e in plan.exchanges] for plan in plans] == [
        [[False], [False]],
        [[True, False], [True]],
        [[False], [True]],
    ]
    assert [[c.push_now.tolist() for c in plan.consumers] for plan in plans] == [
        [[True], [False]],
        [[False, True], [False]],
        [[False], [False]],
    ]
    first_owner = plans[1].exchanges[0]
    assert first_owner.owned.ids.tolist() == [1, 3]
    assert (first_owner.serve_offsets.tolist(), first_owner.serve_rows.tolist()) == ([0, 2, 3], [0, 1, 0])


def test_a_larger_trace_of_many_ranks_is_valid() -> None:
    rng = np.random.default_rng(5)
    batches = [
        make_batch(i, [rng.zipf(1.3, (40 - 17 * (i == 19), 2)).clip(0, 500).tolist() for _ in range(4)])
        for i in range(20)
    ]
    refs = tuple(FeatureRef(feature=feature, table=feature // 2) for feature in range(4))
    for num_slots, assign in ((24, "contiguous"), (24, "locality"), (70, "locality"), (0, "locality")):
        spec = OracleSpec(
            table_rows=(None, 501), features=refs, num_slots=num_slots, lookahead=6, world_size=9, assign=assign
        )
        assert verify(plan_batches(batches, spec), spec).num_batches == 20


def test_memory_follows_window_and_cache_not_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    planner = make_planner(spec_of(num_slots=64, lookahead=4))
    assert isinstance(planner, Planner)
    for index in range(300):
        ids = rng.integers(-(2**63), 2**63, size=32)
        planner.push(make_batch(index, [[ids.tolist()]]))
        if planner.is_ready:
            planner.plan()
    assert planner._handles.num_handles <= 1024  # 300 * 32 rows have passed
    assert planner._resident_sets[0]._queue.num_entries <= 4 * 64 + 32


def test_an_unreferenced_planner_is_freed_immediately() -> None:
    """A planner holds up to 16 B per row of the vocabularies, so it must not wait for garbage collection."""
    gc.disable()
    try:
        for world_size in (1, 2):
            planner = Planner(
                OracleSpec(table_rows=(None,), features=(), num_slots=4, lookahead=2, world_size=world_size)
            )
            alive = weakref.ref(planner)
            del planner
            assert alive() is None
    finally:
        gc.enable()
