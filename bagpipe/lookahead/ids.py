"""The ids of a batch as bytes and back: all that a planner reads of it.

    header │ rank_examples │ values │ lengths        little-endian int64, but lengths: int32, padded to 8 bytes

Lengths that are all 1 are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.client.codec import CodecError
from bagpipe.types.batch import Batch

__all__ = ["concatenate", "decode_ids", "empty_batch", "encode_ids"]

_WORD = 8
#: index, features, examples, values, whether lengths are left out, length of rank_examples.
_HEADER_WORDS = 6
#: Without examples no byte of a frame bounds them.
_MAX_FEATURES = 1 << 20


def encode_ids(batch: Batch) -> list[NDArray[np.uint8]]:
    """The frame of a batch's ids as pieces to join. Contiguous arrays are not copied."""
    header = (
        batch.index,
        batch.num_features,
        batch.num_examples,
        batch.values.shape[0],
        int(batch.is_one_hot),
        len(batch.rank_examples),
        *batch.rank_examples,
    )
    pieces = [_bytes(np.array(header, np.int64)), _bytes(batch.values)]
    if not batch.is_one_hot:
        pieces += (_bytes(batch.lengths), np.zeros(-batch.lengths.nbytes % _WORD, np.uint8))
    return pieces


def decode_ids(frame: bytearray | NDArray[np.uint8]) -> Batch:
    """The batch in a frame: dense ``[n, 0]``, labels 0. Its ids are a view of `frame`.

    Raises:
        CodecError: the sizes in the header are not those of the frame. Checked before anything is allocated; what the
            numbers mean is not checked.
    """
    if len(frame) < _WORD * _HEADER_WORDS:
        raise CodecError(f"malformed ids: {len(frame)} bytes, at least {_WORD * _HEADER_WORDS} needed")
    header = np.frombuffer(frame, np.int64, _HEADER_WORDS).tolist()
    index, num_features, num_examples, num_values, is_one_hot, num_ranks = header
    num_bags = num_features * num_examples
    length_bytes = 0 if is_one_hot else 4 * num_bags
    num_bytes = _WORD * (_HEADER_WORDS + num_ranks + num_values) + length_bytes + -length_bytes % _WORD
    is_sound = min(header) >= 0 and num_features <= _MAX_FEATURES and (num_features or not num_examples)
    if not is_sound or (is_one_hot and num_values != num_bags) or num_bytes != len(frame):
        raise CodecError(f"malformed ids: {len(frame)} bytes, header {header}")
    rank_examples = np.frombuffer(frame, np.int64, num_ranks, offset=_WORD * _HEADER_WORDS)
    start = _WORD * (_HEADER_WORDS + num_ranks)
    shape = num_features, num_examples
    if is_one_hot:
        lengths = np.ones(shape, np.int32)
    else:
        offset = start + _WORD * num_values
        lengths = np.frombuffer(frame, np.int32, num_bags, offset=offset).reshape(shape)
    return Batch(
        index=index,
        dense=np.zeros((num_examples, 0), np.float32),
        values=np.frombuffer(frame, np.int64, num_values, offset=start),
        lengths=lengths,
        labels=np.zeros(num_examples, np.float32),
        rank_examples=tuple(rank_examples.tolist()),
    )


def empty_batch(index: int, num_features: int) -> Batch:
    """A batch without examples."""
    return Batch(
        index=index,
        dense=np.zeros((0, 0), np.float32),
        values=np.empty(0, np.int64),
        lengths=np.zeros((num_features, 0), np.int32),
        labels=np.zeros(0, np.float32),
    )


def concatenate(parts: Sequence[Batch]) -> Batch:
    """The global batch of the ranks' batches, ids only: examples in rank order.

    Args:
        parts: by rank; equal indexes and numbers of features.
    """
    num_features = parts[0].num_features
    if all(part.is_one_hot for part in parts):
        by_bag = [part.values.reshape(num_features, part.num_examples) for part in parts]
        values = np.concatenate(by_bag, axis=1).reshape(-1)
    else:
        bounds = [part.feature_offsets().tolist() for part in parts]
        values = np.concatenate(
            [
                part.values[offsets[feature] : offsets[feature + 1]]
                for feature in range(num_features)
                for part, offsets in zip(parts, bounds, strict=True)
            ]
            or [parts[0].values]
        )
    num_examples = sum(part.num_examples for part in parts)
    return Batch(
        index=parts[0].index,
        dense=np.zeros((num_examples, 0), np.float32),
        values=values,
        lengths=np.concatenate([part.lengths for part in parts], axis=1),
        labels=np.zeros(num_examples, np.float32),
        rank_examples=tuple(part.num_examples for part in parts),
    )


def _bytes(array: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
