"""`fingerprint_of`: a hash of a user's batch, to notice that it changes between its reading and its training.

    batch ──tensors and arrays on the host──> first and last 4 KiB of each ──XXH3──> 64 bits

A loader that fills one buffer again and again is noticed, at a few microseconds for each tensor. A change in the middle
of a large tensor alone is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from bagpipe.train_pipeline.batch_ids import MAX_DEPTH, members, tensors_like

__all__ = ["fingerprint_of"]

#: Bytes hashed at each end of a tensor.
_END_BYTES = 4096


def fingerprint_of(batch: Any) -> int:
    """Hash of a batch's tensors and arrays on the host, in whatever containers; see above."""
    hasher = xxhash.xxh3_64()
    for data in _memory(batch, 0):
        hasher.update(data[:_END_BYTES])
        hasher.update(data[-_END_BYTES:])
    return hasher.intdigest()


def _memory(value: Any, depth: int) -> Iterator[memoryview]:
    """Bytes of each contiguous tensor and array on the host."""
    if isinstance(value, Tensor):
        if _is_plain(value):
            yield value.detach().view(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray):
        if value.flags.c_contiguous and not value.dtype.hasobject:
            yield value.reshape(-1).view(np.uint8).data
    elif tensors_like(value):
        for part in (value.values(), value.lengths(), value.weights_or_none()):
            yield from _memory(part, depth)
    elif depth < MAX_DEPTH and not isinstance(value, (str, bytes)):
        for inner in members(value):
            yield from _memory(inner, depth + 1)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be read as bytes."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        and tensor.is_contiguous()
    )
