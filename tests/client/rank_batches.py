"""Rank batches for tests: random ones for the codec, a realistic one for whole streams."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagpipe.client.codec import encode_rank_batch
from bagpipe.oracle.plan import ConsumerPlan, ExchangePlan, OwnerPlan, RowList
from bagpipe.oracle.rank_batch import PlanSpan, RankBatch
from bagpipe.types.batch import Batch

__all__ = ["arrays_of", "assert_same", "example_rank_batch", "frame_of", "rank_batches"]

_SIZES = st.integers(0, 7)
_INT64 = st.integers(-(2**63), 2**63 - 1)


def _array(dtype: str, num_dims: int = 1) -> st.SearchStrategy[Any]:
    return hnp.arrays(np.dtype(dtype), st.tuples(*[_SIZES] * num_dims))


_ROWS = st.builds(RowList, table_offsets=_array("<i8"), ids=_array("<i8"))


def _batches() -> st.SearchStrategy[Batch]:
    return st.tuples(_SIZES, _SIZES).flatmap(
        lambda sizes: st.builds(
            Batch,
            index=_INT64,
            dense=_array("<f4", 2),
            values=_array("<i8"),
            lengths=hnp.arrays(np.dtype("<i4"), sizes, elements=st.integers(0, 2)),
            labels=hnp.arrays(np.dtype("<f4"), sizes[1]) | hnp.arrays(np.dtype("<f4"), (sizes[1], 2)),
            weights=st.none() | _array("<f4"),
            example_weights=st.none() | hnp.arrays(np.dtype("<f4"), sizes[1]),
            reader_state=st.none() | st.dictionaries(st.text(), _INT64 | st.dictionaries(st.text(), st.booleans())),
        )
    )


def rank_batches() -> st.SearchStrategy[RankBatch]:
    """Rank batches of any shape. Values are arbitrary, but every example has its lengths."""
    return st.builds(
        RankBatch,
        batch=_batches(),
        consumer=st.builds(
            ConsumerPlan,
            unique=_ROWS,
            offsets=_array("<i4"),
            order=_array("<i4"),
            slots=_array("<i4"),
            owners=_array("<u2"),
            push_now=_array("|b1"),
        ),
        owner=st.builds(
            OwnerPlan,
            fetch=_ROWS,
            fetch_slots=_array("<i4"),
            fetch_new=_array("|b1"),
            evict=_ROWS,
            evict_slots=_array("<i4"),
            evict_after=_INT64,
            evict_waiting=_INT64,
            fetch_after=_INT64,
            num_slots=_INT64,
        ),
        num_global_examples=_INT64,
        span=st.builds(PlanSpan, read_start_ns=_INT64, plan_start_ns=_INT64, plan_end_ns=_INT64),
        exchange=st.none()
        | st.builds(
            ExchangePlan,
            pull_now=_array("|b1"),
            owned=_ROWS,
            owned_slots=_array("<i4"),
            owned_pull_now=_array("|b1"),
            owned_push_now=_array("|b1"),
            serve_offsets=_array("<i4"),
            serve_rows=_array("<i4"),
            ready_after=_INT64,
        ),
    )


def example_rank_batch(index: int = 0, num_examples: int = 3) -> RankBatch:
    """A small, realistic, one-hot rank batch."""
    ids = np.arange(num_examples, dtype=np.int64) * 10
    numbers = np.arange(num_examples, dtype=np.int32)
    rows = RowList(table_offsets=np.array([0, num_examples]), ids=ids)
    none = RowList(table_offsets=np.array([0, 0]), ids=np.empty(0, np.int64))
    return RankBatch(
        batch=Batch(
            index=index,
            dense=np.ones((num_examples, 2), np.float32),
            values=ids,
            lengths=np.ones((1, num_examples), np.int32),
            labels=np.zeros(num_examples, np.float32),
        ),
        consumer=ConsumerPlan(
            unique=rows,
            offsets=np.arange(num_examples + 1, dtype=np.int32),
            order=numbers,
            slots=numbers,
            owners=np.zeros(num_examples, np.uint16),
            push_now=np.ones(num_examples, np.bool_),
        ),
        owner=OwnerPlan(
            fetch=rows,
            fetch_slots=numbers,
            fetch_new=np.ones(num_examples, np.bool_),
            evict=none,
            evict_slots=np.empty(0, np.int32),
            evict_after=-1,
            evict_waiting=0,
            fetch_after=-1,
            num_slots=num_examples,
        ),
        num_global_examples=num_examples,
        span=PlanSpan(read_start_ns=1, plan_start_ns=2, plan_end_ns=3),
    )


def frame_of(rank_batch: RankBatch, *, omit_values: bool = False) -> bytearray:
    """The frame that `decode_rank_batch` reads."""
    return bytearray().join(encode_rank_batch(rank_batch, omit_values=omit_values))


def assert_same(one: Any, other: Any) -> None:
    """Assert that two records are equal in bits and types, except spans, which hold times."""
    assert type(one) is type(other)
    if isinstance(one, PlanSpan):
        return
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


def arrays_of(record: object) -> list[np.ndarray[Any, Any]]:
    """All arrays of a record and the records in it, in order."""
    found: list[np.ndarray[Any, Any]] = []
    for name in record.__slots__ if hasattr(record, "__slots__") else ():
        value = getattr(record, name)
        found.extend([value] if isinstance(value, np.ndarray) else arrays_of(value))
    return found
