from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.client.step import Step
from bagpipe.proto.codec import CodecError, decode_step, encode_step
from tests.proto.steps import arrays_of, steps


@settings(max_examples=100, deadline=None)
@given(steps())
def test_a_step_comes_back_bit_for_bit(step: Step) -> None:
    back = decode_step(encode_step(step))
    ours, theirs = arrays_of(step), arrays_of(back)
    assert [(a.dtype, a.shape, a.tobytes()) for a in ours] == [(a.dtype, a.shape, a.tobytes()) for a in theirs]
    assert (back.batch.index, back.num_global_examples, back.span) == (
        step.batch.index,
        step.num_global_examples,
        step.span,
    )
    assert (back.owner.evict_after, back.owner.fetch_after) == (step.owner.evict_after, step.owner.fetch_after)


@given(steps())
@settings(max_examples=10, deadline=None)
def test_decoded_arrays_can_be_written(step: Step) -> None:
    """torch.from_numpy warns about arrays that cannot."""
    assert all(array.flags.writeable for array in arrays_of(decode_step(encode_step(step))))


@settings(max_examples=200, deadline=None)
@given(steps(), st.data())
def test_a_damaged_frame_is_refused_or_is_a_step(step: Step, data: st.DataObject) -> None:
    frame = encode_step(step)
    if data.draw(st.booleans()):
        frame = frame[: data.draw(st.integers(0, len(frame) - 1))]
    else:
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        damaged = decode_step(frame)
    except CodecError:
        return
    assert sum(array.nbytes for array in arrays_of(damaged)) <= len(frame)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "at least"),
        (b"nonsense", "starts with"),
        (b"BPS1\xff\xff\xff\xff", "needed"),
        (b"BPS1\x02\x00\x00\x00{}", "expected step to have"),
        (b"BPS1\x02\x00\x00\x00[1", "malformed"),
    ],
)
def test_what_is_wrong_is_said(frame: bytes, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        decode_step(bytearray(frame))


def test_a_header_that_claims_the_moon_allocates_nothing() -> None:
    header = b'{"table_offsets": ["<i8", [1000000000000000]], "ids": ["<i8", [0]]}'
    frame = b"BPS1" + np.uint32(len(header)).tobytes() + header
    with pytest.raises(CodecError):
        decode_step(bytearray(frame))
