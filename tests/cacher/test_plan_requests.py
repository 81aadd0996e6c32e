"""Requests of a job that brings its own batches: specs, ids, and the memory that they may take."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from bagpipe.client.codec import CodecError
from bagpipe.errors import InputError
from bagpipe.lookahead.frames import encode_spec
from bagpipe.lookahead.ids import encode_ids
from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import Batch
from cacher.counters import Counters
from cacher.plan_requests import MAX_FEATURES, CheckedIntake, batch_bytes, parse_spec, planner_bytes
from tests.lookahead.streams import batch_of, batches_of, plain, spec_of
from tests.oracle.batches import traces

GIB = 1 << 30


def intake(spec: OracleSpec, max_bytes: int = GIB) -> CheckedIntake:
    return CheckedIntake(bytearray(encode_spec(spec)), max_bytes=max_bytes, counters=Counters())


def frame_of(batch: Batch) -> bytearray:
    return bytearray().join(encode_ids(batch))


@settings(max_examples=50)
@given(trace=traces())
def test_whatever_a_planner_plans_is_accepted(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    taken = intake(spec)
    assert taken.spec == spec
    for batch in batches:
        assert plain(taken.batch(frame_of(batch))) == plain(batch)


def text_of(**changes: Any) -> bytearray:
    return bytearray(json.dumps({**dataclasses.asdict(spec_of()), **changes}).encode())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytearray(b"\xff"), "oracle spec: expected a JSON object"),
        (bytearray(b"["), "oracle spec: expected a JSON object"),
        (bytearray(b"[" * 100_000), "oracle spec: expected a JSON object"),
        (bytearray(b"1" * 10_000), "oracle spec: expected a JSON object"),
        (bytearray(b" " * (9 << 20)), "oracle spec: expected at most 8388608 bytes"),
        (bytearray(b"{}"), "oracle spec: expected table_rows, features, num_slots, lookahead, grows, policy"),
        (text_of(more=1), "oracle spec: expected table_rows, "),
        (text_of(table_rows=[]), "expected table_rows to be a list of 1 to 16384"),
        (text_of(table_rows=[1] * (MAX_FEATURES + 1)), "expected table_rows to be a list of 1 to 16384"),
        (text_of(table_rows=[0]), "expected rows of a table from 1 to 9223372036854775807, got 0"),
        (text_of(table_rows=[1 << 63]), "expected rows of a table from 1 to"),
        (text_of(table_rows=["1"]), "expected rows of a table from 1 to"),
        (text_of(features=[]), "expected features to be a list of 1 to 16384"),
        (text_of(features=[{}]), "expected a feature and a table number"),
        (text_of(features=[{"feature": True, "table": 0}]), "expected feature from 0 to 16383, got True"),
        (text_of(features=[{"feature": 1 << 40, "table": 0}]), "expected feature from 0 to 16383"),
        (text_of(features=[{"feature": 0, "table": 1}]), "expected table from 0 to 0, got 1"),
        (text_of(grows=1), "expected grows to be true or false, got 1"),
        (text_of(num_slots=-1), "expected num_slots from 0 to 2147483647, got -1"),
        (text_of(num_slots=1 << 40), "expected num_slots from 0 to 2147483647"),
        (text_of(num_slots=1e9), "expected num_slots from 0 to"),
        (text_of(num_slots=1 << 30), "may take the planner 74.7 GiB, the cacher allows 1 GiB"),
        (text_of(table_rows=[1 << 26]), "may take the planner 1.03 GiB, the cacher allows 1 GiB"),
        (text_of(lookahead=0), "expected lookahead from 1 to 1048576, got 0"),
        (text_of(lookahead=1 << 60), "expected lookahead from 1 to 1048576"),
        (text_of(world_size=0), "expected world_size from 1 to 1024, got 0"),
        (text_of(world_size=1 << 20), "expected world_size from 1 to 1024"),
        (text_of(policy="lru"), "oracle.policy must be one of"),
        (text_of(policy=["lru"]), "expected policy to be a text"),
        (text_of(assign="mine"), "cacher.assign must be one of"),
        (text_of(example_shares=None), "expected example_shares to be a list of 0 to 1"),
        (text_of(example_shares=[1.5]), "expected example_shares from 0 to"),
        (text_of(example_shares=[0]), "example shares: expected a rank with a share above 0"),
    ],
)
def test_a_spec_that_is_refused(data: bytearray, words: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_spec(data, max_bytes=GIB)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def changed(batch: Batch, **changes: Any) -> bytearray:
    """The frame of a batch with some fields replaced, whether they fit each other or not."""
    for name, value in changes.items():
        batch = dataclasses.replace(batch, **{name: value})
    return frame_of(batch)


RAGGED = Batch(
    index=0,
    dense=np.zeros((2, 0), np.float32),
    values=np.array([1, 2, 3]),
    lengths=np.array([[1, 2]], np.int32),
    labels=np.zeros(2, np.float32),
)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytearray(), "malformed ids: 0 bytes"),
        (bytearray(48), "expected from 1 to 16384 features, got 0"),
        (changed(RAGGED, lengths=np.array([[2, 2]], np.int32)), "expected lengths of 3 ids"),
        (changed(RAGGED, lengths=np.array([[4, -1]], np.int32)), "expected lengths of 3 ids"),
        (changed(RAGGED, lengths=np.array([[0, -2147483648]], np.int32)), "expected lengths of 3 ids"),
        (changed(RAGGED, index=int(NEVER)), f"expected batch {NEVER} of at most"),
        (changed(RAGGED, index=1 << 60), "expected batch 1152921504606846976 of at most"),
        (changed(RAGGED, rank_examples=(1, 1)), "expected the examples of 1 ranks"),
        (changed(RAGGED, lengths=np.zeros((MAX_FEATURES + 1, 2), np.int32)), "expected from 1 to 16384 features"),
    ],
)
def test_ids_that_are_refused(data: bytearray, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        intake(spec_of()).batch(data)


@pytest.mark.parametrize("index", [0, 2, 9])
def test_batches_out_of_order_are_refused(index: int) -> None:
    taken = intake(spec_of())
    taken.batch(frame_of(batch_of(0, 1)))
    if index == 0:
        taken.batch(frame_of(batch_of(1, 1)))
    with pytest.raises(CodecError, match=r"expected batch \d of at most 2147483647, got batch \d"):
        taken.batch(frame_of(batch_of(index, 1)))


def test_too_many_lookups_are_refused() -> None:
    """One id that every table reads."""
    refs = tuple(FeatureRef(feature=0, table=table) for table in range(MAX_FEATURES))
    spec = dataclasses.replace(spec_of(), table_rows=(100,) * MAX_FEATURES, features=refs)
    with pytest.raises(CodecError, match="expected at most 2147483647 lookups, got 3276800000"):
        intake(spec).batch(frame_of(batch_of(0, *range(200_000))))


def test_a_window_that_is_too_large_is_refused_with_the_numbers() -> None:
    taken = intake(spec_of(lookahead=1 << 20), max_bytes=33 << 20)
    with pytest.raises(InputError, match=r"planning may take 0.03\d+ GiB with the \d+ batches up to \d+ in the window"):
        list(map(taken.batch, map(frame_of, batches_of(1000))))


def test_planned_batches_make_room() -> None:
    counters = Counters()
    spec = spec_of(num_slots=100)
    limit = planner_bytes(spec) + 3 * batch_bytes(spec, 4)
    taken = CheckedIntake(bytearray(encode_spec(spec)), max_bytes=limit, counters=counters)

    class Plan:
        class span:  # noqa: N801 -- as a record's field
            plan_start_ns, plan_end_ns = 0, 1000

    for batch in batches_of(50):
        taken.batch(frame_of(batch))
        if batch.index >= 2:
            taken.planned(Plan)  # type: ignore[arg-type]
    assert counters.totals().batches_planned == 48


@pytest.mark.parametrize(("world_size", "size"), [(1, 10_000), (1, 10), (2, 10_000), (9, 10_000), (64, 2_000)])
def test_a_window_takes_no_more_memory_than_is_counted(world_size: int, size: int) -> None:
    spec = OracleSpec(
        table_rows=(None, None),
        features=(FeatureRef(feature=0, table=0), FeatureRef(feature=0, table=1)),
        num_slots=2 * size,
        lookahead=30,
        world_size=world_size,
    )
    generator = np.random.default_rng(0)
    batches = [batch_of(index, *generator.integers(0, 2**62, size).tolist()) for index in range(20)]
    tracemalloc.start()
    try:
        planner = make_planner(spec)
        for batch in batches:
            planner.push(batch)
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = planner_bytes(spec) + len(batches) * batch_bytes(spec, 2 * size)
    assert taken < counted
    assert peak < 2 * counted
