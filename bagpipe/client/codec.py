"""`RankBatch` to bytes and back. No I/O, no pickle.

    RankBatch ─> {"batch": {"index": 7, "values": ["<i8", [26]], …}, …} ─> JSON header │ 8-byte aligned LE arrays
    frame     ─> payload of a CacherMessage (`bagpipe.client.message`), or in shared memory (`bagpipe.lookahead`)

The header gives each array's dtype and shape. The arrays follow in the order of the records' fields. Two arrays can be
left out (null in the header), half of the bytes of a one-hot batch: `lengths` that are all 1, and `values` that
are those of the plan's rows.

The decoder checks what a record declares before it builds it: the kind of each field, each array's dtype and number of
dimensions, and that its bytes are there. It does not check what the numbers mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import ConsumerPlan, ExchangePlan, OracleSpec, OwnerPlan, RowList, by_occurrence
from bagpipe.oracle.rank_batch import PlanSpan, RankBatch
from bagpipe.types.batch import Batch
from bagpipe.util.documents import parse_json

__all__ = ["CodecError", "decode_rank_batch", "encode_rank_batch", "is_csr", "values_are_derivable"]

_MAGIC = b"BPS1"
_PREFIX = struct.Struct("<4sI")  # magic, header bytes
_ALIGNMENT = 8


class CodecError(ValueError):
    """The bytes are not a frame of this version."""


@dataclass(frozen=True, slots=True)
class _Array:
    """An array field: dtype and number of dimensions.

    Attributes:
        optional: the record allows None.
        omissible: optional, and the header has no such field for None. So records without it are those of old.
        more_dims: further dimensions that it may have.
        derivable: the decoder can derive it from the rest of the `RankBatch`.
    """

    dtype: str
    num_dims: int = 1
    optional: bool = False
    derivable: bool = False
    omissible: bool = False
    more_dims: int = 0


@dataclass(frozen=True, slots=True)
class _Json:
    """A field that holds a JSON object or null."""


@dataclass(frozen=True, slots=True)
class _Optional:
    """A record field that can be null.

    Attributes:
        omissible: as of `_Array`.
    """

    record: type
    omissible: bool = False


#: The records on the wire: fields in order, and what each holds: `_Array`, int, `_Json`, or a record.
_RECORDS: Mapping[type, Mapping[str, Any]] = {
    RankBatch: {
        "batch": Batch,
        "consumer": ConsumerPlan,
        "owner": OwnerPlan,
        "num_global_examples": int,
        "span": PlanSpan,
        "exchange": _Optional(ExchangePlan),
    },
    Batch: {
        "index": int,
        "dense": _Array("<f4", 2),
        "values": _Array("<i8", derivable=True),
        "lengths": _Array("<i4", 2, derivable=True),
        "labels": _Array("<f4", more_dims=1),
        "weights": _Array("<f4", optional=True),
        "example_weights": _Array("<f4", optional=True, omissible=True),
        "reader_state": _Json(),
    },
    RowList: {"table_offsets": _Array("<i8"), "ids": _Array("<i8")},
    ConsumerPlan: {
        "unique": RowList,
        "offsets": _Array("<i4"),
        "order": _Array("<i4"),
        "slots": _Array("<i4"),
        "owners": _Array("<u2"),
        "push_now": _Array("|b1"),
    },
    OwnerPlan: {
        "fetch": RowList,
        "fetch_slots": _Array("<i4"),
        "fetch_new": _Array("|b1"),
        "evict": RowList,
        "evict_slots": _Array("<i4"),
        "evict_after": int,
        "evict_waiting": int,
        "fetch_after": int,
        "num_slots": int,
        "expired": _Optional(RowList, omissible=True),
        "expired_slots": _Array("<i4", optional=True, omissible=True),
    },
    ExchangePlan: {
        "pull_now": _Array("|b1"),
        "owned": RowList,
        "owned_slots": _Array("<i4"),
        "owned_pull_now": _Array("|b1"),
        "owned_push_now": _Array("|b1"),
        "serve_offsets": _Array("<i4"),
        "serve_rows": _Array("<i4"),
        "ready_after": int,
    },
    PlanSpan: {"read_start_ns": int, "plan_start_ns": int, "plan_end_ns": int},
}

#: Fields that the header of a record has.
_REQUIRED: Mapping[type, frozenset[str]] = {
    record: frozenset(
        name for name, item in fields.items() if not (isinstance(item, _Array | _Optional) and item.omissible)
    )
    for record, fields in _RECORDS.items()
}

_DTYPES: Mapping[str, np.dtype[Any]] = {
    item.dtype: np.dtype(item.dtype)
    for fields in _RECORDS.values()
    for item in fields.values()
    if isinstance(item, _Array)
}


def values_are_derivable(spec: OracleSpec, num_features: int) -> bool:
    """Whether the plan has a batch's `values`, in their order: it reads every feature, in the batch's order."""
    return [ref.feature for ref in spec.features] == list(range(num_features))


def encode_rank_batch(rank_batch: RankBatch, *, omit_values: bool = False) -> list[bytes | memoryview]:
    """The frame of a rank batch as pieces of bytes to join. Arrays are not copied."""
    omitted = {"values"} if omit_values else set()
    lengths = rank_batch.batch.lengths
    if lengths.size == rank_batch.batch.values.size and lengths.size and bool((lengths == 1).all()):
        omitted.add("lengths")
    arrays: list[NDArray[Any]] = []
    header = json.dumps(_describe(rank_batch, arrays, omitted)).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header)) + header
    parts: list[bytes | memoryview] = [prefix, _padding(len(prefix))]
    for array in arrays:
        parts += (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, _padding(array.nbytes))
    return parts


def decode_rank_batch(frame: bytearray) -> RankBatch:
    """The rank batch in a frame. Its arrays are views of `frame`, but for those that were left out.

    Raises:
        CodecError: the bytes are not a rank batch.
    """
    if len(frame) < _PREFIX.size:
        raise CodecError(f"malformed frame: {len(frame)} bytes, at least {_PREFIX.size} needed")
    magic, header_bytes = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise CodecError(f"expected a frame that starts with {_MAGIC!r}, got {bytes(frame[:4])!r}")
    if _PREFIX.size + header_bytes > len(frame):
        raise CodecError(f"malformed frame: {len(frame)} bytes, {_PREFIX.size + header_bytes} needed")
    try:
        header = parse_json(frame[_PREFIX.size : _PREFIX.size + header_bytes])
    except ValueError as error:
        raise CodecError(f"malformed frame: {error}") from None
    reader = _Reader(frame, _aligned(_PREFIX.size + header_bytes))
    return _derive(_build(RankBatch, "rank_batch", header, reader))


def _derive(rank_batch: Any) -> RankBatch:
    """The rank batch with the arrays that were left out.

    Raises:
        CodecError: the shapes of what is there do not match. Checked before anything is allocated.
    """
    batch, consumer = rank_batch.batch, rank_batch.consumer
    values, lengths = batch.values, batch.lengths
    if values is None:
        values = _values_of(consumer)
    if lengths is None and batch.num_examples and values.size % batch.num_examples == 0:
        lengths = np.ones((values.size // batch.num_examples, batch.num_examples), np.int32)
    if lengths is None or lengths.shape[1] != batch.num_examples:
        shape = None if lengths is None else lengths.shape
        raise CodecError(f"malformed rank batch: {shape} lengths, {batch.num_examples} examples, {values.size} ids")
    if values is not batch.values or lengths is not batch.lengths:
        batch = dataclasses.replace(batch, values=values, lengths=lengths)
        rank_batch = dataclasses.replace(rank_batch, batch=batch)
    whole: RankBatch = rank_batch
    return whole


def is_csr(offsets: NDArray[np.int32], num_rows: int, num_occurrences: int) -> bool:
    """Whether row pointers ascend from 0 to the number of occurrences. (Differences of int32 could wrap around.)"""
    spans = offsets.shape[0] == num_rows + 1 and int(offsets[0]) == 0 and int(offsets[-1]) == num_occurrences
    return spans and bool((offsets[1:] >= offsets[:-1]).all())


def _values_of(consumer: ConsumerPlan) -> NDArray[np.int64]:
    """The id of each occurrence.

    Raises:
        CodecError: the arrays do not fit each other. Checked before anything is allocated.
    """
    offsets, order = consumer.offsets, consumer.order
    if not is_csr(offsets, len(consumer.unique), len(order)):
        raise CodecError(f"malformed rank batch: {len(consumer.unique)} rows, {len(order)} ids, other CSR offsets")
    try:
        return by_occurrence(consumer.unique.ids, offsets, order)
    except IndexError as error:
        raise CodecError(f"malformed rank batch: {error}") from None


class _Reader:
    """Reads the arrays behind the header in order."""

    def __init__(self, frame: bytearray, offset: int) -> None:
        self._frame = frame
        self._offset = offset

    def array(self, path: str, name: str, expected: _Array, value: object) -> NDArray[Any] | None:
        if value is None and (expected.optional or expected.derivable):
            return None
        shape = _shape(expected, value)
        if shape is None:
            raise CodecError(
                f"malformed frame: expected {path}.{name} to be {expected.dtype} with {expected.num_dims} dimensions, "
                f"got {str(value)[:80]}"
            )
        count = math.prod(shape)
        dtype = _DTYPES[expected.dtype]
        end = self._offset + count * dtype.itemsize
        if end > len(self._frame):
            raise CodecError(f"malformed frame: {len(self._frame)} bytes, {path}.{name} needs {end}")
        array = np.frombuffer(self._frame, dtype, count, self._offset)
        self._offset = min(_aligned(end), len(self._frame))
        return array if len(shape) == 1 else array.reshape(shape)


def _shape(expected: _Array, value: object) -> list[int] | None:
    """The shape in an array's header ``[dtype, shape]``; None if the header does not match."""
    if not isinstance(value, list) or len(value) != 2 or value[0] != expected.dtype or not isinstance(value[1], list):
        return None
    shape = value[1]
    for size in shape:
        if type(size) is not int or size < 0:
            return None
    return shape if expected.num_dims <= len(shape) <= expected.num_dims + expected.more_dims else None


def _describe(record: object, arrays: list[NDArray[Any]], omitted: Collection[str] = ()) -> dict[str, Any]:
    """Header of a record. Appends its arrays in the order of the fields; `omitted` names derivable fields."""
    header: dict[str, Any] = {}
    for name, expected in _RECORDS[type(record)].items():
        value = getattr(record, name)
        if type(expected) is _Array:
            if value is not None and not (expected.derivable and name in omitted):
                arrays.append(value)
                header[name] = (value.dtype.str, value.shape)
            elif not expected.omissible:
                header[name] = None
        elif type(value) in _RECORDS:
            header[name] = _describe(value, arrays, omitted)
        elif value is None and isinstance(expected, _Optional) and expected.omissible:
            continue
        else:
            header[name] = value
    return header


def _build(kind: type, path: str, header: object, reader: _Reader) -> Any:
    fields = _RECORDS[kind]
    if not isinstance(header, dict) or not _REQUIRED[kind] <= header.keys() <= fields.keys():
        raise CodecError(f"malformed frame: expected {path} to have {', '.join(fields)}, got {str(header)[:80]}")
    values: dict[str, Any] = {}
    for name, expected in fields.items():
        value = header.get(name)
        if type(expected) is _Array:
            values[name] = reader.array(path, name, expected, value)
        elif expected is int:
            if type(value) is not int or not -(2**63) <= value < 2**63:
                raise CodecError(f"malformed frame: expected {path}.{name} to be an integer, got {str(value)[:80]}")
            values[name] = value
        elif isinstance(expected, _Json):
            if value is not None and not isinstance(value, dict):
                raise CodecError(f"malformed frame: expected {path}.{name} to be an object, got {str(value)[:80]}")
            values[name] = value
        elif isinstance(expected, _Optional):
            values[name] = None if value is None else _build(expected.record, f"{path}.{name}", value, reader)
        else:
            values[name] = _build(expected, f"{path}.{name}", value, reader)
    return kind(**values)


def _padding(num_bytes: int) -> bytes:
    """The padding after `num_bytes` bytes."""
    return bytes(_aligned(num_bytes) - num_bytes)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
