"""Steps as bytes: there and back again, and nothing but CodecError for bytes that are none."""

from __future__ import annotations

import dataclasses
import json
import struct
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagpipe.client import codec
from bagpipe.client.codec import CodecError, decode_rank_batch
from bagpipe.oracle.rank_batch import RankBatch
from tests.client.rank_batches import arrays_of, assert_same, encode_rank_batch, example_rank_batch, steps


@settings(deadline=None)
@given(steps())
def test_round_trip(step: RankBatch) -> None:
    frame = encode_rank_batch(step)
    back = decode_rank_batch(frame)
    assert_same(back, step)
    assert back.span == step.span
    assert encode_rank_batch(back) == frame


def test_arrays_are_views_at_aligned_places() -> None:
    """And can be written: torch.from_numpy warns about arrays that cannot."""
    frame = encode_rank_batch(example_rank_batch())
    assert all(array.flags.writeable for array in arrays_of(decode_rank_batch(frame)))
    values = decode_rank_batch(frame).batch.values
    assert not values.flags.owndata
    base = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    assert (values.__array_interface__["data"][0] - base) % 8 == 0


def test_the_format_says_what_the_records_say() -> None:
    """Every field of every record, in order, with the dtype of its annotation."""
    for record, fields in codec._RECORDS.items():
        assert list(fields) == [field.name for field in dataclasses.fields(record)]
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


def test_arrays_that_are_not_contiguous_are_sent_all_the_same() -> None:
    step = example_rank_batch()
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    batch = dataclasses.replace(step.batch, dense=wide[:, ::2])
    back = decode_rank_batch(encode_rank_batch(dataclasses.replace(step, batch=batch)))
    np.testing.assert_array_equal(back.batch.dense, wide[:, ::2])


@pytest.mark.parametrize("length", range(0, len(encode_rank_batch(example_rank_batch())), 7))
def test_a_frame_cut_short(length: int) -> None:
    with pytest.raises(CodecError):
        decode_rank_batch(encode_rank_batch(example_rank_batch())[:length])


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_mutated_frame_is_refused_or_is_a_step(data: st.DataObject) -> None:
    frame = encode_rank_batch(example_rank_batch())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place] = data.draw(st.integers(0, 255))
    try:
        step = decode_rank_batch(frame)
    except CodecError:
        return
    assert sum(array.nbytes for array in arrays_of(step)) <= len(frame)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"BPS1")
@example(b"BPS1\xff\xff\xff\xff")
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CodecError):
        decode_rank_batch(bytearray(noise))


def reheaded(change: dict[str, object] | str) -> bytearray:
    """The example frame with another header: ``{"batch.values": new}`` or raw text."""
    frame = encode_rank_batch(example_rank_batch())
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
        ({"batch.values": None}, "rank_batch.batch.values"),
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
def test_headers_that_lie(change: dict[str, object] | str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_rank_batch(reheaded(change))


def test_the_header_change_above_is_what_is_refused() -> None:
    assert_same(decode_rank_batch(reheaded({"batch.index": 0})), example_rank_batch())
