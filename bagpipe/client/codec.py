"""Frozen records of numpy arrays to bytes and back. Sans I/O, no pickle.

    record ─> {"b": {"values": array, "index": 7, …}, …} ─> JSON header | 8-byte aligned little-endian arrays

The header gives each array's dtype and shape; they follow it in the order of the records' fields. Everything a record
declares is checked before it is built: the kind of each field, each array's dtype and number of dimensions, and that
its bytes are there. What the numbers mean is the oracle's affair.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import ConsumerPlan, ExchangePlan, OwnerPlan, RowList
from bagpipe.oracle.rank_batch import PlanSpan, RankBatch
from bagpipe.types.batch import Batch

__all__ = ["CodecError", "decode_rank_batch", "rank_batch_parts"]

_MAGIC = b"BPS1"
_PREFIX = struct.Struct("<4sI")  # magic, header bytes
_ALIGNMENT = 8


class CodecError(ValueError):
    """The bytes are not a frame of this version."""


@dataclass(frozen=True, slots=True)
class _Array:
    """An array field: dtype and number of dimensions."""

    dtype: str
    num_dims: int = 1
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _Json:
    """A field that holds a JSON object, or nothing (null)."""


@dataclass(frozen=True, slots=True)
class _Optional:
    """A record field that may be missing (null)."""

    record: type


#: Records that may travel: per record, its fields in order and what each must hold: `_Array`, int, `_Json`, a record.
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
        "values": _Array("<i8"),
        "lengths": _Array("<i4", 2),
        "labels": _Array("<f4"),
        "weights": _Array("<f4", optional=True),
        "reader_state": _Json(),
    },
    RowList: {"table_offsets": _Array("<i8"), "ids": _Array("<i8")},
    ConsumerPlan: {
        "unique": RowList,
        "inverse": _Array("<i4"),
        "offsets": _Array("<i4"),
        "order": _Array("<i4"),
        "slots": _Array("<i4"),
        "owners": _Array("<u2"),
        "sync_now": _Array("|b1"),
    },
    OwnerPlan: {
        "fetch": RowList,
        "fetch_slots": _Array("<i4"),
        "fetch_new": _Array("|b1"),
        "evict": RowList,
        "evict_slots": _Array("<i4"),
        "evict_after": int,
        "fetch_after": int,
        "num_slots": int,
    },
    ExchangePlan: {
        "pull_now": _Array("|b1"),
        "owned": RowList,
        "owned_slots": _Array("<i4"),
        "owned_pull_now": _Array("|b1"),
        "owned_sync_now": _Array("|b1"),
        "serve_offsets": _Array("<i4"),
        "serve_rows": _Array("<i4"),
    },
    PlanSpan: {"read_start_ns": int, "plan_start_ns": int, "plan_end_ns": int},
}


def rank_batch_parts(step: RankBatch) -> list[bytes | memoryview]:
    """A step as pieces of bytes, to be joined; arrays are not copied."""
    arrays: list[NDArray[Any]] = []
    header = json.dumps(_describe(step, arrays)).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header)) + header
    parts: list[bytes | memoryview] = [prefix, _padding(len(prefix))]
    for array in arrays:
        parts += (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, _padding(array.nbytes))
    return parts


def decode_rank_batch(frame: bytearray) -> RankBatch:
    """The step in these bytes; its arrays are views of `frame`.

    Raises:
        CodecError: the bytes are not a step.
    """
    if len(frame) < _PREFIX.size:
        raise CodecError(f"malformed frame: {len(frame)} bytes, at least {_PREFIX.size} needed")
    magic, header_bytes = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise CodecError(f"expected a frame that starts with {_MAGIC!r}, got {bytes(frame[:4])!r}")
    if _PREFIX.size + header_bytes > len(frame):
        raise CodecError(f"malformed frame: {len(frame)} bytes, {_PREFIX.size + header_bytes} needed")
    try:
        header = json.loads(frame[_PREFIX.size : _PREFIX.size + header_bytes])
    except (ValueError, RecursionError) as error:
        raise CodecError(f"malformed frame: {error}") from None
    step: RankBatch = _build(RankBatch, "rank_batch", header, _Reader(frame, _aligned(_PREFIX.size + header_bytes)))
    return step


class _Reader:
    """Hands out the arrays behind the header, one after the other."""

    def __init__(self, frame: bytearray, offset: int) -> None:
        self._frame = frame
        self._offset = offset

    def array(self, path: str, expected: _Array, value: object) -> NDArray[Any] | None:
        if value is None and expected.optional:
            return None
        shape = _shape(expected, value)
        if shape is None:
            raise CodecError(
                f"malformed frame: expected {path} to be {expected.dtype} with {expected.num_dims} dimensions, "
                f"got {str(value)[:80]}"
            )
        count = math.prod(shape)
        dtype = np.dtype(expected.dtype)
        end = self._offset + count * dtype.itemsize
        if end > len(self._frame):
            raise CodecError(f"malformed frame: {len(self._frame)} bytes, {path} needs {end}")
        array = np.frombuffer(self._frame, dtype=dtype, count=count, offset=self._offset).reshape(shape)
        self._offset = min(_aligned(end), len(self._frame))
        return array


def _shape(expected: _Array, value: object) -> list[int] | None:
    """The shape in an array's header ``[dtype, shape]``; None if it is not what is expected."""
    if not isinstance(value, list) or len(value) != 2 or value[0] != expected.dtype or not isinstance(value[1], list):
        return None
    shape = [size for size in value[1] if type(size) is int and size >= 0]
    return shape if len(shape) == len(value[1]) == expected.num_dims else None


def _describe(record: object, arrays: list[NDArray[Any]]) -> dict[str, Any]:
    """Header of a record; its arrays are appended in the order of the fields."""
    return dict(_described_fields(record, arrays))


def _described_fields(record: object, arrays: list[NDArray[Any]]) -> Iterator[tuple[str, Any]]:
    for name in _RECORDS[type(record)]:
        value = getattr(record, name)
        if isinstance(value, np.ndarray):
            arrays.append(value)
            yield name, [value.dtype.str, list(value.shape)]
        elif dataclasses.is_dataclass(value):
            yield name, _describe(value, arrays)
        else:
            yield name, value


def _build(kind: type, path: str, header: object, reader: _Reader) -> Any:
    fields = _RECORDS[kind]
    if not isinstance(header, dict) or header.keys() != fields.keys():
        raise CodecError(f"malformed frame: expected {path} to have {', '.join(fields)}, got {str(header)[:80]}")
    values: dict[str, Any] = {}
    for name, expected in fields.items():
        value, where = header[name], f"{path}.{name}"
        if isinstance(expected, _Array):
            values[name] = reader.array(where, expected, value)
        elif expected is int:
            if type(value) is not int or not -(2**63) <= value < 2**63:
                raise CodecError(f"malformed frame: expected {where} to be an integer, got {str(value)[:80]}")
            values[name] = value
        elif isinstance(expected, _Json):
            if value is not None and not isinstance(value, dict):
                raise CodecError(f"malformed frame: expected {where} to be an object, got {str(value)[:80]}")
            values[name] = value
        elif isinstance(expected, _Optional):
            values[name] = None if value is None else _build(expected.record, where, value, reader)
        else:
            values[name] = _build(expected, where, value, reader)
    return kind(**values)


def _padding(num_bytes: int) -> bytes:
    """What follows so many bytes up to an aligned place."""
    return bytes(_aligned(num_bytes) - num_bytes)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
