"""`encode_message`: a rank batch as the serialised protobuf message that a cacher sends.

Joined, the messages of several rank batches are one message with these batches: so protobuf encodes a repeated field.
"""

from __future__ import annotations

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import encode_rank_batch
from bagpipe.oracle.rank_batch import RankBatch

__all__ = ["encode_message"]

_LENGTH_DELIMITED = 2  # protobuf's wire type of messages and bytes


def encode_message(run: int, index: int, rank_batch: RankBatch, *, omit_values: bool = False) -> bytes:
    """The serialised `CacherMessage` of a rank batch. Each array is copied once, straight to its place.

    protobuf's own encoder would write the same bytes, but copy them three more times.

    Args:
        omit_values: leave out the batch's ids; allowed if `bagpipe.client.codec.values_are_derivable`.
    """
    parts = encode_rank_batch(rank_batch, omit_values=omit_values)
    num_bytes = sum(map(len, parts))
    head = pb.RankBatch(run=run, index=index).SerializeToString()
    head += _field(pb.RankBatch.PAYLOAD_FIELD_NUMBER, num_bytes)
    return b"".join((_field(pb.CacherMessage.RANK_BATCHES_FIELD_NUMBER, len(head) + num_bytes), head, *parts))


def _field(number: int, num_bytes: int) -> bytes:
    """Protobuf's tag and length of a field of bytes."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(num_bytes)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
