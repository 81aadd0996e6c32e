from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from bagpipe.batch import Batch
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.plan import NO_BATCH, CachePlan, FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner, plan_batches
from bagpipe.oracle.verify import verify
from tests.oracle.batches import make_batch, traces


def spec_of(num_slots: int, lookahead: int, policy: str = "belady-window") -> OracleSpec:
    return OracleSpec(
        table_rows=(None,),
        features=(FeatureRef(feature=0, table=0),),
        num_slots=num_slots,
        lookahead=lookahead,
        policy=policy,
    )


def one_id_a_batch(ids: str) -> list[Batch]:
    """A batch per letter: the id of the letter, one example."""
    return [make_batch(index, [[[ord(letter)]]]) for index, letter in enumerate(ids)]


def story(ids: str, spec: OracleSpec) -> list[str]:
    """Each plan as text: ``+`` fetched rows, ``-`` evicted rows."""
    return [
        "".join(f"-{chr(i)}" for i in plan.owners[0].evict.ids)
        + "".join(f"+{chr(i)}" for i in plan.owners[0].fetch.ids)
        for _, plan in plan_batches(one_id_a_batch(ids), spec)
    ]


@settings(max_examples=400, deadline=None)
@given(traces())
def test_every_plan_of_every_trace_is_valid(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    assert verify(plan_batches(batches, spec), spec) == len(batches)


def as_bytes(plan: CachePlan) -> bytes:
    parts: list[bytes] = []
    for record in (*plan.consumers, *plan.owners):
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            rows = [value.table_offsets, value.ids] if hasattr(value, "ids") else [np.asarray(value)]
            parts.extend(array.tobytes() for array in rows)
    return b"|".join(parts)


@settings(max_examples=100, deadline=None)
@given(traces())
def test_plans_are_a_pure_function_of_the_batches(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    # Ids in a new array each time, as a loader that cuts its blocks elsewhere would hand them over.
    copies = [dataclasses.replace(batch, values=batch.values.copy()) for batch in batches]
    first = [as_bytes(plan) for _, plan in plan_batches(batches, spec)]
    assert first == [as_bytes(plan) for _, plan in plan_batches(iter(copies), spec)]


def test_evicts_the_row_needed_last() -> None:
    # With room for 3: d must push out the one of a, b, c whose next use is last, and that is b.
    assert story("abcdacb", spec_of(num_slots=3, lookahead=64)) == ["+a", "+b", "+c", "-b+d", "", "", "-d+b"]


def test_spares_the_batch_before_so_that_inserts_overlap_its_compute() -> None:
    # c is needed last, but it is the batch before: its value is still changing. b goes instead.
    assert story("abcdabc", spec_of(num_slots=3, lookahead=64))[3] == "-b+d"
    for batches_ahead in (1, 2, 8):
        for _, plan in plan_batches(one_id_a_batch("abcdabcadcb"), spec_of(num_slots=3, lookahead=batches_ahead)):
            assert plan.owners[0].evict_after <= max(plan.batch_index - 2, NO_BATCH)


def test_takes_the_batch_before_when_nothing_else_is_left() -> None:
    plans = [plan for _, plan in plan_batches(one_id_a_batch("aba"), spec_of(num_slots=1, lookahead=8))]
    assert [plan.owners[0].evict_after for plan in plans] == [NO_BATCH, 0, 1]
    assert [plan.owners[0].fetch_after for plan in plans] == [NO_BATCH, NO_BATCH, 1]


def test_the_papers_rule_drops_what_the_window_does_not_use() -> None:
    story_of_paper = story("abcdabcd", spec_of(num_slots=9, lookahead=2, policy="paper"))
    assert story_of_paper == ["+a", "+b", "-a+c", "-b+d", "-c+a", "-d+b", "-a+c", "-b+d"]
    assert story("abcdabcd", spec_of(num_slots=9, lookahead=2))[4:] == ["", "", "", ""]


def test_idle_rows_leave_by_recency_and_frequent_ones_later() -> None:
    assert story("abcd", spec_of(num_slots=3, lookahead=1))[3] == "-a+d"
    assert story("aaabcd", spec_of(num_slots=3, lookahead=1))[5] == "-b+d"


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


def test_an_id_outside_its_table_is_refused() -> None:
    spec = OracleSpec(table_rows=(10,), features=(FeatureRef(feature=0, table=0),), num_slots=4, lookahead=1)
    for bad in (10, -1):
        with pytest.raises(InputError, match=rf"ids in \[0, 10\), got {bad}"):
            make_planner(spec).push(make_batch(0, [[[3, bad]]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "best"}, "oracle.policy must be one of belady-window, paper, got 'best'"),
        ({"lookahead": 0}, "oracle.lookahead must be at least 1, got 0"),
        ({"num_slots": -1}, "cache.rows must be at least 0, got -1"),
        ({"world_size": 2}, "one trainer rank"),
    ],
)
def test_a_spec_that_cannot_be_planned_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_planner(dataclasses.replace(spec_of(num_slots=4, lookahead=1), **change))  # type: ignore[arg-type]


def test_memory_follows_window_and_cache_not_the_vocabulary() -> None:
    rng = np.random.default_rng(0)
    planner = make_planner(spec_of(num_slots=64, lookahead=4))
    for index in range(300):
        ids = rng.integers(-(2**63), 2**63, size=32)
        planner.push(make_batch(index, [[ids.tolist()]]))
        if planner.is_ready:
            planner.plan()
    assert planner._handles.num_handles <= 1024  # 300 * 32 rows went by
    assert planner._queue.num_entries <= 4 * 64 + 32
