"""Frames in pieces, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import MAX_TRAINER_MESSAGE_BYTES
from bagpipe.client.codec import CodecError
from bagpipe.lookahead.pieces import PIECE_BYTES, FrameJoiner, pieces_of


@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]), max_size=4),
    kind=st.integers(1, 9),
    run=st.integers(0, 2**32 - 1),
)
def test_a_frame_comes_whole(sizes: list[int], kind: int, run: int) -> None:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    joiner = FrameJoiner(1 << 22)
    for _ in range(2):  # one frame after another
        pieces = list(pieces_of(kind, run, parts))
        assert len(pieces) == max(1, -(-sum(sizes) // PIECE_BYTES))
        assert all(pb.PlanRequest(piece=piece).ByteSize() < MAX_TRAINER_MESSAGE_BYTES for piece in pieces)
        *before, frame = map(joiner.add, pieces)
        assert before == [None] * (len(pieces) - 1)
        assert frame is not None
        assert (frame.kind, frame.run, bytes(frame.data)) == (kind, run, b"".join(parts))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([pb.Piece(data=b"x")], "expected the first piece of a frame"),
        ([pb.Piece(kind=1, num_bytes=101)], "expected a frame of at most 100 bytes, got 101"),
        ([pb.Piece(kind=1, num_bytes=2**64 - 1)], "expected a frame of at most 100 bytes, got 18446744073709551615"),
        ([pb.Piece(kind=1, num_bytes=3, data=b"four")], "expected a frame of 3 bytes, got 4"),
        ([pb.Piece(kind=1, num_bytes=3)], "expected bytes in a piece of a frame"),
        ([pb.Piece(kind=1, num_bytes=3, data=b"a"), pb.Piece()], "expected a further piece of a frame"),
        ([pb.Piece(kind=1, num_bytes=3, data=b"a"), pb.Piece(kind=1, data=b"b")], "expected a further piece"),
        ([pb.Piece(kind=1, num_bytes=3, data=b"a"), pb.Piece(data=b"bcd")], "expected a frame of 3 bytes, got 4"),
    ],
)
def test_pieces_that_make_no_frame(pieces: list[pb.Piece], words: str) -> None:
    joiner = FrameJoiner(100)
    *before, last = pieces
    assert [joiner.add(piece) for piece in before] == [None] * len(before)
    with pytest.raises(CodecError, match=words):
        joiner.add(last)
