"""Frames of a planner in pieces that fit a message, and back. Pure.

    frame of any size ──pieces_of──> first piece: kind, run, size │ further pieces ──FrameJoiner──> frame

A cacher limits requests to 1 MiB by the length in their header, whatever is in them. Memory for a frame is taken as its
bytes come, so a size in a header alone takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import CodecError
from bagpipe.lookahead.link import Frame

__all__ = ["PIECE_BYTES", "FrameJoiner", "pieces_of"]

#: Bytes of a frame in a piece, at most. Half of `bagpipe.client.agreement.MAX_TRAINER_MESSAGE_BYTES`.
PIECE_BYTES = 1 << 19


def pieces_of(kind: int, run: int, parts: Sequence[Any]) -> Iterator[pb.Piece]:
    """The pieces of a frame; each copies its bytes when it is taken.

    Args:
        kind, run: see `Frame`; `kind` is not 0.
        parts: contiguous buffers, sent as one.
    """
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    head: dict[str, int] = {"kind": kind, "run": run, "num_bytes": sum(map(len, views))}
    room, piece = PIECE_BYTES, list[memoryview]()
    for view in views:
        start = 0
        while len(view) - start > room:
            piece.append(view[start : start + room])
            start += room
            yield pb.Piece(**head, data=b"".join(piece))
            head, room, piece = {}, PIECE_BYTES, []
        piece.append(view[start:])
        room -= len(view) - start
    if piece or head:
        yield pb.Piece(**head, data=b"".join(piece))


class FrameJoiner:
    """Joins pieces.

    Args:
        max_bytes: of a frame.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frame: Frame | None = None  # not complete
        self._num_bytes = 0

    def add(self, piece: pb.Piece) -> Frame | None:
        """The frame that a piece completes, if it does.

        Raises:
            CodecError: the piece does not follow those before, or the frame is too large.
        """
        if self._frame is None:
            if not piece.kind:
                raise CodecError("expected the first piece of a frame, got a further one")
            if piece.num_bytes > self._max_bytes:
                raise CodecError(f"expected a frame of at most {self._max_bytes} bytes, got {piece.num_bytes}")
            self._frame = Frame(kind=piece.kind, run=piece.run, data=bytearray())
            self._num_bytes = piece.num_bytes
        elif piece.kind or not piece.data:
            raise CodecError("expected a further piece of a frame, got a first or an empty one")
        frame = self._frame
        frame.data.extend(piece.data)
        if len(frame.data) > self._num_bytes:
            raise CodecError(f"expected a frame of {self._num_bytes} bytes, got {len(frame.data)}")
        if len(frame.data) < self._num_bytes:
            if not piece.data:
                raise CodecError("expected bytes in a piece of a frame, got none")
            return None
        self._frame = None
        return frame
