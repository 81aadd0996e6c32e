"""`fingerprint_of`: a hash of a user's batch, to notice that it changes between its reading and its training.

    batch ──tensors and arrays on the host──> first and last 4 KiB of each ──XXH3──> 64 bits

A loader that fills one buffer again and again is noticed, at a few microseconds for each tensor. A change in the middle
of a large tensor alone is not.
"""

from __future__ import annotations

from ctypes import string_at
from typing import Any

import torch
import xxhash
from torch import Tensor

from bagpipe.train_pipeline.batch_graph import Leaves

__all__ = ["fingerprint_of", "fingerprint_of_leaves"]

#: Bytes hashed at each end of a tensor.
_END_BYTES = 4096


def fingerprint_of(batch: Any) -> int:
    """Hash of a batch's tensors and arrays on the host, in whatever containers; see above."""
    return fingerprint_of_leaves(Leaves(batch))


def fingerprint_of_leaves(leaves: Leaves) -> int:
    """`fingerprint_of` of a batch whose leaves are known."""
    hasher = xxhash.xxh3_64()
    for tensor in leaves.all_tensors():
        if (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
        ):
            _update(hasher, tensor.data_ptr(), tensor.nbytes)
    for array in leaves.arrays:
        if array.flags.c_contiguous and not array.dtype.hasobject:
            _update(hasher, array.__array_interface__["data"][0], array.nbytes)
    return hasher.intdigest()


def _update(hasher: xxhash.xxh3_64, address: int, num_bytes: int) -> None:
    """Hash the two ends of memory on the host; an address of 0 has none."""
    if num_bytes <= 2 * _END_BYTES:
        hasher.update(string_at(address, num_bytes if address else 0))
    elif address:
        hasher.update(string_at(address, _END_BYTES))
        hasher.update(string_at(address + num_bytes - _END_BYTES, _END_BYTES))
