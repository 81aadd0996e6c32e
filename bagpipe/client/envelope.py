"""A `RankBatch` as the bytes of a `CacherMessage`: the step's arrays are copied once, straight to their place.

protobuf's own encoder would copy them three more times. It would write the same bytes; a test compares.
"""

from __future__ import annotations

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.codec import rank_batch_parts
from bagpipe.oracle.rank_batch import RankBatch

__all__ = ["rank_batch_message"]

_LENGTH_DELIMITED = 2


def rank_batch_message(run: int, index: int, step: RankBatch) -> bytes:
    """The serialised `CacherMessage` that carries a step."""
    parts = rank_batch_parts(step)
    num_bytes = sum(map(len, parts))
    head = pb.RankBatch(run=run, index=index).SerializeToString()
    head += _field(pb.RankBatch.PAYLOAD_FIELD_NUMBER, num_bytes)
    return b"".join((_field(pb.CacherMessage.RANK_BATCH_FIELD_NUMBER, len(head) + num_bytes), head, *parts))


def _field(number: int, num_bytes: int) -> bytes:
    """Tag and length of a field of bytes."""
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(num_bytes)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
