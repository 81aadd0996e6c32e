"""Frozen records of numpy arrays to bytes and back. Sans I/O, no pickle.

    record ─> {"b": {"values": array, "index": 7, …}, …} ─> JSON header | 8-byte aligned little-endian arrays

The header gives each array's dtype, shape and offset; sizes are checked against the buffer before anything is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.batch import Batch
from bagpipe.client.step import PlanSpan, Step
from bagpipe.oracle.plan import ConsumerPlan, OwnerPlan, RowList

__all__ = ["CodecError", "decode_step", "encode_step"]

_MAGIC = b"BPS1"
_PREFIX = struct.Struct("<4sI")  # magic, header bytes
_ALIGNMENT = 8
_DTYPES = frozenset({"<f4", "<i8", "<i4", "<u2", "|b1"})


class CodecError(ValueError):
    """The bytes are not a frame of this version."""


#: Records that may travel, by the name of the field they are found under.
_RECORDS: Mapping[str, type] = {
    "batch": Batch,
    "consumer": ConsumerPlan,
    "owner": OwnerPlan,
    "span": PlanSpan,
    "unique": RowList,
    "fetch": RowList,
    "evict": RowList,
}


def encode_step(step: Step) -> bytearray:
    """A step as bytes."""
    arrays: list[NDArray[Any]] = []
    header = json.dumps(_describe(step, arrays)).encode()
    start = _aligned(_PREFIX.size + len(header))
    ends = [start]
    for array in arrays:
        ends.append(_aligned(ends[-1] + array.nbytes))
    frame = bytearray(ends[-1])
    _PREFIX.pack_into(frame, 0, _MAGIC, len(header))
    frame[_PREFIX.size : _PREFIX.size + len(header)] = header
    for array, offset in zip(arrays, ends[:-1], strict=True):
        np.frombuffer(frame, dtype=array.dtype, count=array.size, offset=offset)[:] = array.reshape(-1)
    return frame


def decode_step(frame: bytearray) -> Step:
    """The step in these bytes; its arrays are views of `frame`.

    Raises:
        CodecError: the bytes are not a step.
    """
    try:
        magic, header_bytes = _PREFIX.unpack_from(frame)
        if magic != _MAGIC or _PREFIX.size + header_bytes > len(frame):
            raise CodecError(f"expected a frame that starts with {_MAGIC!r}, got {bytes(frame[:4])!r}")
        header = json.loads(frame[_PREFIX.size : _PREFIX.size + header_bytes])
        reader = _Reader(frame, _aligned(_PREFIX.size + header_bytes))
        step: Step = _build(Step, header, reader)
    except (struct.error, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CodecError(f"malformed frame: {error}") from error
    return step


class _Reader:
    """Hands out the arrays behind the header, one after the other."""

    def __init__(self, frame: bytearray, offset: int) -> None:
        self._frame = frame
        self._offset = offset

    def array(self, dtype: str, shape: list[int]) -> NDArray[Any]:
        if dtype not in _DTYPES or any(not isinstance(size, int) or size < 0 for size in shape):
            raise CodecError(f"malformed frame: array of {dtype} {shape}")
        count = math.prod(shape)
        num_bytes = count * np.dtype(dtype).itemsize
        if self._offset + num_bytes > len(self._frame):
            raise CodecError(f"malformed frame: {len(self._frame)} bytes, {self._offset + num_bytes} needed")
        array = np.frombuffer(self._frame, dtype=dtype, count=count, offset=self._offset).reshape(shape)
        self._offset = _aligned(self._offset + num_bytes)
        return array


def _describe(record: Any, arrays: list[NDArray[Any]]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            arrays.append(value)
            header[field.name] = [value.dtype.str, list(value.shape)]
        elif dataclasses.is_dataclass(value):
            header[field.name] = _describe(value, arrays)
        else:
            header[field.name] = value
    return header


def _build(kind: type, header: Mapping[str, Any], reader: _Reader) -> Any:
    values: dict[str, Any] = {}
    # Fields are read in the order they were written: the order of the arrays.
    for field in dataclasses.fields(kind):
        value = header[field.name]
        if isinstance(value, dict):
            values[field.name] = _build(_RECORDS[field.name], value, reader)
        elif isinstance(value, list):
            values[field.name] = reader.array(*value)
        else:
            values[field.name] = value
    return kind(**values)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
