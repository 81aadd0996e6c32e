"""A shard's index of a batch to bytes and back. No I/O, no pickle.

    IndexedBatch, lengths ─> {"batch": 7, "ranks": 8, "counts": […], …} ─> JSON header │ 8-byte aligned LE arrays

The arrays follow in a fixed order; the header gives the number of their elements. Lengths that are all 1 are left out.
The decoder checks that the bytes are there and that the arrays fit each other. It does not check what the numbers mean.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.client.codec import CodecError, is_csr
from bagpipe.oracle.batch_indexer import IndexedBatch
from bagpipe.oracle.index import BatchIndex
from bagpipe.oracle.plan import RowList
from bagpipe.oracle.rank_index import RankIndex
from bagpipe.util.documents import parse_json

__all__ = ["ShardPart", "decode_index", "encode_index"]

_MAGIC = b"BPI1"
_PREFIX = struct.Struct("<4sI")  # magic, header bytes
_ALIGNMENT = 8
_INT32, _INT64, _BYTE = np.dtype("<i4"), np.dtype("<i8"), np.dtype("|u1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPart:
    """A shard's index of a batch.

    Attributes:
        indexed: of its tables; the others have no rows. The examples of its ranks are empty if they were not asked for.
        lengths: int32 ``[num_features, num_examples]`` of its features, if they were asked for; else None.
        is_one_hot: the lengths are known to be all 1.
    """

    indexed: IndexedBatch
    lengths: NDArray[np.int32] | None = None
    is_one_hot: bool = False


def encode_index(part: ShardPart, *, with_examples: bool) -> list[bytes | memoryview]:
    """The frame of a shard's index as pieces of bytes to join. Arrays are not copied.

    Args:
        with_examples: with the examples of each rank.
    """
    indexed, lengths = part.indexed, part.lengths
    arrays: list[NDArray[Any]] = [indexed.unique.table_offsets, indexed.unique.ids]
    if indexed.whole is not None:
        arrays += [indexed.whole.offsets, indexed.whole.order]
    for rank in indexed.rank_indexes:
        examples = rank.examples if with_examples else rank.examples[:0]
        arrays += [examples, rank.rows, rank.offsets, rank.order]
    if indexed.next_use is not None:
        arrays.append(indexed.next_use)
    are_ones = lengths is not None and int(lengths.min(initial=1)) == int(lengths.max(initial=1)) == 1
    is_narrow = lengths is not None and int(lengths.max(initial=0)) <= np.iinfo(np.uint8).max
    if lengths is not None and not are_ones:
        arrays.append((lengths.astype(np.uint8) if is_narrow else lengths).reshape(-1))
    header = json.dumps(
        {
            "batch": indexed.batch_index,
            "ranks": len(indexed.rank_indexes),
            "next_use": indexed.next_use is not None,
            "lengths": None if lengths is None else lengths.shape,
            "ones": are_ones,
            "narrow": is_narrow,
            "counts": [array.shape[0] for array in arrays],
        }
    ).encode()
    parts: list[bytes | memoryview] = [_PREFIX.pack(_MAGIC, len(header)), header]
    parts.append(_padding(_PREFIX.size + len(header)))
    for array in arrays:
        parts += (np.ascontiguousarray(array).view(np.uint8).data, _padding(array.nbytes))
    return [each for each in parts if len(each)]


def decode_index(frame: bytes) -> ShardPart:
    """The index in a frame. Its arrays are views of `frame`.

    Raises:
        CodecError: the bytes are not the index of a batch.
    """
    header = _header(frame)
    try:
        ranks, shape = int(header["ranks"]), header["lengths"]
        has_next_use, are_ones = bool(header["next_use"]), bool(header["ones"])
        dtypes: list[np.dtype[Any]] = [
            _INT64,
            _INT64,
            *[_INT32] * (4 * ranks if ranks else 2),
            *[_INT32] * has_next_use,
        ]
        if shape is not None and not are_ones:
            dtypes.append(_BYTE if header["narrow"] else _INT32)
        counts = [int(count) for count in header["counts"]]
        if len(counts) != len(dtypes) or min(counts) < 0:
            raise CodecError(f"malformed index: expected {len(dtypes)} arrays, got {len(counts)}")
        arrays = _arrays(frame, dtypes, counts)
        unique = RowList(table_offsets=next(arrays), ids=next(arrays))
        whole: BatchIndex | None = None
        rank_indexes: tuple[RankIndex, ...] = ()
        if ranks:
            rank_indexes = tuple(_rank_index(arrays) for _ in range(ranks))
        else:
            whole = BatchIndex(unique=unique, offsets=next(arrays), order=next(arrays))
        next_use = next(arrays) if has_next_use else None
        lengths: NDArray[np.int32] | None = None
        if are_ones:
            lengths = np.broadcast_to(np.int32(1), shape)
        elif shape is not None:
            lengths = next(arrays).reshape(shape).astype(np.int32, copy=False)
        indexed = IndexedBatch(
            batch_index=int(header["batch"]),
            unique=unique,
            whole=whole,
            rank_indexes=rank_indexes,
            next_use=next_use,
        )
    except CodecError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"malformed index: {error}") from None
    _check(indexed)
    return ShardPart(indexed=indexed, lengths=lengths, is_one_hot=are_ones)


def _header(frame: bytes) -> dict[str, Any]:
    if len(frame) < _PREFIX.size:
        raise CodecError(f"malformed index: {len(frame)} bytes, at least {_PREFIX.size} needed")
    magic, size = _PREFIX.unpack_from(frame)
    if magic != _MAGIC or _PREFIX.size + size > len(frame):
        raise CodecError(f"malformed index: expected {_MAGIC!r} and a header, got {magic!r} and {len(frame)} bytes")
    try:
        header = parse_json(frame[_PREFIX.size : _PREFIX.size + size])
    except ValueError as error:
        raise CodecError(f"malformed index: {error}") from None
    if not isinstance(header, dict):
        raise CodecError("malformed index: expected a JSON object in the header")
    return header


def _arrays(frame: bytes, dtypes: list[np.dtype[Any]], counts: list[int]) -> Iterator[NDArray[Any]]:
    offset = _aligned(_PREFIX.size + _PREFIX.unpack_from(frame)[1])
    for dtype, count in zip(dtypes, counts, strict=True):
        if offset + count * dtype.itemsize > len(frame):
            raise CodecError(f"malformed index: {len(frame)} bytes, an array needs {offset + count * dtype.itemsize}")
        yield np.frombuffer(frame, dtype, count, offset)
        offset = _aligned(offset + count * dtype.itemsize)


def _rank_index(arrays: Iterator[NDArray[Any]]) -> RankIndex:
    return RankIndex(examples=next(arrays), rows=next(arrays), offsets=next(arrays), order=next(arrays))


def _check(indexed: IndexedBatch) -> None:
    """Raise CodecError unless the arrays fit each other."""
    offsets, num_rows = indexed.unique.table_offsets, len(indexed.unique)
    fits = offsets.shape[0] > 0 and offsets[0] == 0 and offsets[-1] == num_rows and bool((np.diff(offsets) >= 0).all())
    fits = fits and (indexed.next_use is None or indexed.next_use.shape[0] == num_rows)
    indexes: list[tuple[int, BatchIndex | RankIndex]] = [(rank.rows.shape[0], rank) for rank in indexed.rank_indexes]
    if indexed.whole is not None:
        indexes.append((num_rows, indexed.whole))
    fits = fits and all(is_csr(index.offsets, size, index.order.shape[0]) for size, index in indexes)
    if not fits:
        raise CodecError("malformed index: its arrays do not fit each other")


def _padding(num_bytes: int) -> bytes:
    return bytes(_aligned(num_bytes) - num_bytes)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
