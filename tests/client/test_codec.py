"""Serialisation of rank batches, and CodecError for invalid bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagpipe.client import codec
from bagpipe.client.codec import CodecError, decode_rank_batch, values_are_derivable
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch
from tests.cacher.daemons import config, planned_batches
from tests.client.rank_batches import arrays_of, assert_same, example_rank_batch, frame_of, rank_batches
from tests.effort import at_most


@at_most(40)
@given(rank_batches())
def test_round_trip(rank_batch: RankBatch) -> None:
    frame = frame_of(rank_batch)
    back = decode_rank_batch(frame)
    assert_same(back, rank_batch)
    assert back.span == rank_batch.span
    assert frame_of(back) == frame


def test_times_do_not_travel() -> None:
    plain = example_rank_batch()
    times_s = np.arange(plain.batch.num_examples, dtype=np.int64)
    timed = dataclasses.replace(plain, batch=dataclasses.replace(plain.batch, times_s=times_s))
    assert frame_of(timed) == frame_of(plain)
    assert decode_rank_batch(frame_of(timed)).batch.times_s is None


def test_arrays_are_views_at_aligned_places() -> None:
    """The arrays are writable: torch.from_numpy warns about read-only arrays."""
    frame = frame_of(example_rank_batch())
    assert all(array.flags.writeable for array in arrays_of(decode_rank_batch(frame)))
    values = decode_rank_batch(frame).batch.values
    assert not values.flags.owndata
    base = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    assert (values.__array_interface__["data"][0] - base) % 8 == 0


def test_the_format_matches_the_records() -> None:
    """The format lists every field of every record, in order, with the dtype of its annotation.

    What only a planner's input has is not sent.
    """
    unsent = {"times_s", "next_use", "is_born", "expired", "rank_examples", "parts"}
    for record, fields in codec._RECORDS.items():
        names = [field.name for field in dataclasses.fields(record)]
        assert list(fields) == [name for name in names if not (record is Batch and name in unsent)]
        hints = typing.get_type_hints(record)
        for name, expected in fields.items():
            hint = hints[name]
            if isinstance(expected, codec._Array):
                assert np.dtype(expected.dtype).name in str(hint)
                assert expected.optional == (type(None) in typing.get_args(hint))
            elif isinstance(expected, codec._Optional):
                assert hint == (expected.record | None)
            elif isinstance(expected, codec._Json):
                assert hint == (Mapping[str, Any] | None)
            else:
                assert hint is expected


def test_arrays_that_are_not_contiguous_can_be_sent() -> None:
    rank_batch = example_rank_batch()
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    batch = dataclasses.replace(rank_batch.batch, dense=wide[:, ::2])
    back = decode_rank_batch(frame_of(dataclasses.replace(rank_batch, batch=batch)))
    np.testing.assert_array_equal(back.batch.dense, wide[:, ::2])


@pytest.mark.parametrize("length", range(0, len(frame_of(example_rank_batch())), 7))
def test_a_frame_cut_short(length: int) -> None:
    with pytest.raises(CodecError):
        decode_rank_batch(frame_of(example_rank_batch())[:length])


@given(st.data())
def test_a_mutated_frame_is_refused_or_valid(data: st.DataObject) -> None:
    frame = frame_of(example_rank_batch())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place] = data.draw(st.integers(0, 255))
    try:
        rank_batch = decode_rank_batch(frame)
    except CodecError:
        return
    # `values` are derived from half as many bytes, `lengths` from as many bytes as they have.
    assert sum(array.nbytes for array in arrays_of(rank_batch)) <= 4 * len(frame)


@given(st.binary(max_size=200))
@example(b"")
@example(b"BPS1")
@example(b"BPS1\xff\xff\xff\xff")
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CodecError):
        decode_rank_batch(bytearray(noise))


def reheaded(change: dict[str, object] | str) -> bytearray:
    """The example frame with another header: ``{"batch.values": new}`` or raw text."""
    frame = frame_of(example_rank_batch())
    _, header_bytes = struct.unpack_from("<4sI", frame)
    header = json.loads(frame[8 : 8 + header_bytes])
    body = frame[-(-(8 + header_bytes) // 8) * 8 :]
    if isinstance(change, dict):
        for path, value in change.items():
            *parents, name = path.split(".")
            place = header
            for parent in parents:
                place = place[parent]
            place[name] = value
        text = json.dumps(header).encode()
    else:
        text = change.encode()
    padding = -(8 + len(text)) % 8
    return bytearray(struct.pack("<4sI", b"BPS1", len(text)) + text + b"\0" * padding) + body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch.values": ["<i8", [10**15]]}, "needs"),
        ({"batch.values": ["<i8", [-1]]}, "rank_batch.batch.values"),
        ({"batch.values": ["<i8", [3, 1]]}, "with 1 dimensions"),
        ({"batch.values": ["<i8", [True]]}, "rank_batch.batch.values"),
        ({"batch.values": ["<i8", [1.0]]}, "rank_batch.batch.values"),
        ({"batch.values": ["<i8"]}, "rank_batch.batch.values"),
        ({"batch.values": ["|O", [3]]}, "rank_batch.batch.values"),
        ({"batch.values": ["<f8", [3]]}, "rank_batch.batch.values"),
        ({"batch.dense": None}, "rank_batch.batch.dense"),
        ({"batch.values": 3}, "rank_batch.batch.values"),
        ({"batch.index": "0"}, "rank_batch.batch.index to be an integer"),
        ({"batch.index": True}, "rank_batch.batch.index to be an integer"),
        ({"batch.index": 2**70}, "rank_batch.batch.index to be an integer"),
        ({"batch.index": ["<i8", [1]]}, "rank_batch.batch.index to be an integer"),
        ({"batch": None}, "expected rank_batch.batch to have"),
        ({"batch": {}}, "expected rank_batch.batch to have"),
        ({"other": 1}, "expected rank_batch to have"),
        ("[1]", "expected rank_batch to have"),
        ("{", "malformed frame"),
        ("[" * 100_000, "malformed frame"),
        ('{"batch": ' + "9" * 5000 + "}", "malformed frame"),
    ],
)
def test_false_headers(change: dict[str, object] | str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_rank_batch(reheaded(change))


def test_an_unchanged_header_is_accepted() -> None:
    assert_same(decode_rank_batch(reheaded({"batch.index": 0})), example_rank_batch())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("limit", [200, 3])  # 3: ranks without examples
@pytest.mark.parametrize("omit_values", [False, True])
def test_planned_batches_come_back_whole(world_size: int, limit: int, omit_values: bool) -> None:
    for batches in planned_batches(config(batch_size=20, limit=limit), world_size):
        for rank_batch in batches:
            assert_same(decode_rank_batch(frame_of(rank_batch, omit_values=omit_values)), rank_batch)


def test_one_hot_batches_shrink() -> None:
    rank_batch = example_rank_batch(num_examples=100)
    batch = rank_batch.batch
    # The same sizes, but not one-hot.
    lengths = np.array([[0, 2, *[1] * 98]], np.int32)
    bags = dataclasses.replace(rank_batch, batch=dataclasses.replace(batch, lengths=lengths))
    saved = batch.values.nbytes + batch.lengths.nbytes
    assert len(frame_of(bags)) - len(frame_of(rank_batch, omit_values=True)) == pytest.approx(saved, abs=32)


def test_bags_keep_their_lengths() -> None:
    rank_batch = example_rank_batch(num_examples=4)
    lengths = np.array([[2, 0, 1, 1]], np.int32)
    rank_batch = dataclasses.replace(rank_batch, batch=dataclasses.replace(rank_batch.batch, lengths=lengths))
    back = decode_rank_batch(frame_of(rank_batch, omit_values=True))
    assert back.batch.lengths.tolist() == [[2, 0, 1, 1]]
    assert_same(back, rank_batch)


@pytest.mark.parametrize(("features", "derivable"), [((0, 1, 2), True), ((0, 1), False), ((0, 2, 1), False)])
def test_values_are_derivable_if_all_features_are_read_in_order(features: tuple[int, ...], derivable: bool) -> None:
    refs = tuple(FeatureRef(feature=feature, table=table) for table, feature in enumerate(features))
    spec = OracleSpec(table_rows=(1,) * len(refs), features=refs, num_slots=1, lookahead=1)
    assert values_are_derivable(spec, 3) is derivable


def test_inconsistent_sizes_are_refused_before_allocation() -> None:
    rank_batch = example_rank_batch()
    for changes in (
        {"lengths": np.empty((1 << 40, 0), np.int32)},
        {"lengths": np.empty((1, 2), np.int32)},
        {"labels": np.zeros(1 << 20, np.float32)},
    ):
        batch = dataclasses.replace(rank_batch.batch, **changes)
        with pytest.raises(CodecError, match="malformed rank batch"):
            decode_rank_batch(frame_of(dataclasses.replace(rank_batch, batch=batch), omit_values=True))
    of_plan: tuple[tuple[dict[str, Any], str], ...] = (
        ({"order": np.array([0, 1, 9], np.int32)}, "malformed rank batch: index 9"),
        ({"offsets": np.array([0, 1, 1 << 30, 3], np.int32)}, "3 rows, 3 ids, other CSR offsets"),
        ({"offsets": np.array([0, 3], np.int32)}, "3 rows, 3 ids, other CSR offsets"),
        ({"offsets": np.array([0, 1, 2, 1 << 30], np.int32)}, "3 rows, 3 ids, other CSR offsets"),
        ({"offsets": np.array([0, (1 << 31) - 1, -2, 3], np.int32)}, "3 rows, 3 ids, other CSR offsets"),
    )
    for changes, message in of_plan:
        beyond = dataclasses.replace(rank_batch.consumer, **changes)
        with pytest.raises(CodecError, match=message):
            decode_rank_batch(frame_of(dataclasses.replace(rank_batch, consumer=beyond), omit_values=True))
